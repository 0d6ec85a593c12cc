"""The scripted model by its definition, one token at a time in plain Python: where expected tokens come from."""

from __future__ import annotations

import math

from service_chassis.protocol.digest import mix
from service_chassis.protocol.noise import noise_bits, noise_key

VOCAB = 260


def chain(tokens: list[int]) -> int:
    h = mix(0x6D616E69)
    for token in tokens:
        h = mix(h ^ mix(token + 1))
    return h


def logits(tokens: list[int]) -> list[float]:
    h = chain(tokens)
    return [(mix(h ^ mix(i + 0x100000000)) >> 40) / 2**24 * 8 for i in range(VOCAB)]


def greedy(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        scores = logits(tokens)
        tokens.append(scores.index(max(scores)))
    return tokens[len(prompt) :]


def seeded(prompt: list[int], count: int, seed: int, sample_index: int, temperature: float) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        k0, k1 = noise_key(seed, sample_index, len(tokens))
        scores = []
        for i, score in enumerate(logits(tokens)):
            v = min((noise_bits(k0, k1, i) + 0.5) / 2**32, 1 - 2**-24)
            scores.append(score / temperature - math.log(-math.log1p(-v)))
        tokens.append(scores.index(max(scores)))
    return tokens[len(prompt) :]
