"""Make requests, send them in a closed loop (N at once) or an open one (so many a second), and time the answers."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol


class Door(Protocol):
    """One way into a server. The load is the same through each."""

    async def __aenter__(self) -> Door: ...

    async def __aexit__(self, *_: object) -> None: ...

    async def vocab_size(self) -> int:
        """Return the number of ids; raises ``ConnectionError`` while the server does not answer."""

    def stream(self, token_ids: Sequence[int], max_tokens: int) -> AsyncIterator[int]:
        """Generate greedily, past the end of text, and yield how many tokens each message brought."""


@dataclass(frozen=True, slots=True)
class Length:
    """A fixed number of tokens, or a range to draw from."""

    low: int
    high: int

    @classmethod
    def read(cls, text: str) -> Length:
        """Read "128" or "64:256"."""
        low, _, high = text.partition(":")
        length = cls(int(low), int(high or low))
        if not 1 <= length.low <= length.high:
            raise ValueError(f"{text} is no length: it must be N or LOW:HIGH with 1 <= LOW <= HIGH")
        return length

    def draw(self, source: random.Random) -> int:
        return source.randint(self.low, self.high)

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}:{self.high}"


@dataclass(frozen=True, slots=True)
class Prompt:
    token_ids: tuple[int, ...]
    output_len: int
    wait_s: float  # after the one before, in an open loop


def make_prompts(
    count: int,
    input_len: Length,
    output_len: Length,
    vocab_size: int,
    seed: int | str,
    rate: float | None,
    shared_prefix_len: int = 0,
) -> list[Prompt]:
    """Return ``count`` prompts of random ids, all with the same ``shared_prefix_len`` ids before their own.

    Else no two share a prefix, so that no cache helps anybody.
    """
    source = random.Random(seed)
    # Special tokens sit at either end of a vocabulary.
    low, high = vocab_size // 8, vocab_size - vocab_size // 8
    prefix = tuple(source.randrange(low, high) for _ in range(shared_prefix_len))
    return [
        Prompt(
            token_ids=(*prefix, *(source.randrange(low, high) for _ in range(input_len.draw(source)))),
            output_len=output_len.draw(source),
            wait_s=source.expovariate(rate) if rate else 0.0,
        )
        for _ in range(count)
    ]


@dataclass(slots=True)
class Outcome:
    """What came of one request. Times on one monotonic clock, seconds."""

    num_input_tokens: int
    began: float
    first: float = 0.0
    ended: float = 0.0
    num_output_tokens: int = 0
    gaps_s: list[float] = field(default_factory=list)  # between tokens; those of one message share its gap
    error: str = ""


async def send(door: Door, prompt: Prompt) -> Outcome:
    """Send one request and read its stream to the end."""
    outcome = Outcome(len(prompt.token_ids), time.perf_counter())
    last = 0.0
    try:
        async for count in door.stream(prompt.token_ids, prompt.output_len):
            now = time.perf_counter()
            if not count:
                continue
            if not outcome.num_output_tokens:
                outcome.first = now
            else:
                outcome.gaps_s += [(now - last) / count] * count
            outcome.num_output_tokens += count
            last = now
    except Exception as error:  # a bench goes on, and says what failed
        outcome.error = f"{type(error).__name__}: {error}"
    outcome.ended = time.perf_counter()
    if not outcome.error and outcome.num_output_tokens != prompt.output_len:
        outcome.error = f"asked for {prompt.output_len} tokens, got {outcome.num_output_tokens}"
    return outcome


async def run_closed(door: Door, prompts: Sequence[Prompt], concurrency: int) -> list[Outcome]:
    """Keep ``concurrency`` requests running until all prompts are done."""
    waiting = iter(prompts)
    outcomes: list[Outcome] = []

    async def lane() -> None:
        for prompt in waiting:
            outcomes.append(await send(door, prompt))

    await asyncio.gather(*(lane() for _ in range(min(concurrency, len(prompts)))))
    return outcomes


async def run_open(door: Door, prompts: Sequence[Prompt]) -> list[Outcome]:
    """Send each prompt at its time, whatever became of the ones before."""
    tasks = []
    due = time.perf_counter()
    for prompt in prompts:
        # From the plan, not from the last send: a late sender catches up, and the rate stays what was asked for.
        due += prompt.wait_s
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        tasks.append(asyncio.create_task(send(door, prompt)))
    return await asyncio.gather(*tasks)
