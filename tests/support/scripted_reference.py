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


def gumbel_noise(seed: int, sample_index: int, position: int, vocab_size: int) -> list[float]:
    """The noise of a position, as the protocol words it."""
    k0, k1 = noise_key(seed, sample_index, position)
    uniform = (min((noise_bits(k0, k1, i) + 0.5) / 2**32, 1 - 2**-24) for i in range(vocab_size))
    return [-math.log(-math.log1p(-v)) for v in uniform]


def seeded(prompt: list[int], count: int, seed: int, sample_index: int, temperature: float) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        noise = gumbel_noise(seed, sample_index, len(tokens), VOCAB)
        scores = [score / temperature + one for score, one in zip(logits(tokens), noise, strict=True)]
        tokens.append(scores.index(max(scores)))
    return tokens[len(prompt) :]


def hidden_of(h: int) -> list[float]:
    """The hidden state of a token: twelve numbers in [-1, 1)."""
    return [(mix(h ^ mix(i + 0x200000000)) >> 40) / 2**23 - 1 for i in range(12)]


def vector(prompt: list[int], pooling: str) -> list[float]:
    """The embedding of a prompt, not scaled; ``pooling`` is last or mean."""
    if pooling == "last":
        return hidden_of(chain(prompt))
    h, states = chain([]), []
    for token in prompt:
        h = mix(h ^ mix(token + 1))
        states.append(hidden_of(h))
    return [sum(column) / len(states) for column in zip(*states, strict=True)]
