"""Random requests to scripted ranks, what each must get, and what came of it."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from maniple_client import AsyncClient, Done, ManipleError, Started
from support.scripted_reference import VOCAB, greedy, seeded

LONGEST = 60
# Longer than any fault holds a request up: its client resumes for 30 s, and an adopted one waits for as long.
HANG_S = 75.0


@dataclass(frozen=True)
class Template:
    """A prompt with its outputs by the model's definition, computed once: a shorter request gets the head of them."""

    prompt: list[int]
    temperature: float
    seed: int
    outputs: list[list[int]]  # by sample

    @classmethod
    def random(cls, source: random.Random) -> Template:
        prompt = [source.randrange(VOCAB) for _ in range(source.choice([1, 3, 17, 60]))]
        if source.random() < 0.5:
            return cls(prompt, 0.0, 0, [greedy(prompt, LONGEST)])
        seed, temperature = source.getrandbits(64), source.choice([0.6, 1.0, 1.7])
        outputs = [seeded(prompt, LONGEST, seed, index, temperature) for index in range(source.choice([1, 1, 2]))]
        return cls(prompt, temperature, seed, outputs)


@dataclass
class Request:
    """One request: what is asked, how its client behaves, and what each of its samples must get."""

    request_id: str
    template: Template
    max_tokens: int
    stop_id: int | None
    deadline_s: float | None
    cancel_after: int | None  # tokens, over all samples
    abort_after: int | None
    detach_grace_s: float

    @classmethod
    def random(cls, number: int, templates: Sequence[Template], source: random.Random) -> Request:
        template = source.choice(templates)
        behaviour = source.random()
        return cls(
            request_id=f"soak-{number}",
            template=template,
            max_tokens=source.randrange(1, LONGEST + 1),
            stop_id=source.choice(template.outputs[0]) if source.random() < 0.3 else None,
            deadline_s=source.uniform(0.02, 0.6) if behaviour < 0.1 else None,
            cancel_after=source.randrange(1, 20) if 0.1 <= behaviour < 0.2 else None,
            abort_after=source.randrange(1, 20) if 0.2 <= behaviour < 0.3 else None,
            detach_grace_s=20.0 if source.random() < 0.8 else 0.0,
        )

    def __str__(self) -> str:
        behaviour = {
            "deadline_s": self.deadline_s,
            "cancel_after": self.cancel_after,
            "abort_after": self.abort_after,
            "detach_grace_s": self.detach_grace_s,
        }
        return " ".join([self.request_id, *(f"{name}={value:.3g}" for name, value in behaviour.items() if value)])

    def expected(self, index: int) -> tuple[list[int], str]:
        """Return the whole output of one sample, and why it ends."""
        output = self.template.outputs[index][: self.max_tokens]
        if self.stop_id is not None and self.stop_id in output:
            return output[: output.index(self.stop_id) + 1], "stop"
        return output, "length"

    def options(self) -> dict[str, Any]:
        """Return what the client is asked for."""
        options: dict[str, Any] = {
            "request_id": self.request_id,
            "token_ids": self.template.prompt,
            "max_tokens": self.max_tokens,
            "temperature": self.template.temperature,
            "n": len(self.template.outputs),
            "ignore_eos": True,
            "timeout_s": self.deadline_s,
        }
        if self.template.temperature:
            options["seed"] = self.template.seed
        if self.stop_id is not None:
            options["stop_token_ids"] = [self.stop_id]
        if self.detach_grace_s:
            options["detach_grace_s"] = self.detach_grace_s
        return options


@dataclass
class Outcome:
    """How one stream ended."""

    kind: str  # for the table
    ended_at: float
    num_tokens: int = 0
    status: ManipleError | None = None
    wrong: list[str] = field(default_factory=list)


# Says whether a status may come at a time, for a request; returns why not.
Judge = Callable[[Request, ManipleError, float], str]


async def run_request(client: AsyncClient, request: Request, judge: Judge) -> Outcome:
    """Run one request to its end, whatever that is, and judge it."""
    stream = client.generate(**request.options())
    num_tokens, is_aborting, wrong = 0, False, []
    aborts: list[asyncio.Task[bool]] = []
    kind, status = "finished", None
    try:
        async with asyncio.timeout(HANG_S):
            async for event in stream:
                if isinstance(event, Started | Done):
                    continue
                num_tokens = sum(len(sample.token_ids) for sample in stream.transcript.samples.values())
                if request.cancel_after is not None and num_tokens >= request.cancel_after:
                    stream.close()
                    kind = "cancelled by us"
                    break
                if request.abort_after is not None and num_tokens >= request.abort_after and not is_aborting:
                    is_aborting = True
                    aborts.append(asyncio.create_task(client.abort(request.request_id)))
    except ManipleError as error:
        kind, status = f"{type(error).__name__} {error.reason}".strip(), error
        if why_not := judge(request, error, time.monotonic()):
            wrong.append(f"{kind}: {why_not}: {error.message}")
    except TimeoutError:
        kind = "hung"
        wrong.append(f"nothing ended it within {HANG_S:g} s")
    finally:
        stream.close()
        await asyncio.gather(*aborts, return_exceptions=True)
    wrong += _wrong_tokens(request, stream.transcript, kind == "finished", is_aborting)
    if kind == "finished" and any(
        sample.finished and sample.finished.reason == "abort" for sample in stream.transcript.samples.values()
    ):
        kind = "aborted by us" if is_aborting else "finish reason abort"
    return Outcome(kind, time.monotonic(), num_tokens, status, [f"{request}: {one}" for one in wrong])


def _wrong_tokens(request: Request, transcript: Any, is_finished: bool, is_aborting: bool) -> list[str]:
    """Compare what came with what must come: all of it, or the head of it where the stream ended early."""
    wrong = []
    for index in range(len(request.template.outputs)):
        sample = transcript.samples.get(index)
        token_ids = sample.token_ids if sample is not None else []
        wanted, reason = request.expected(index)
        finished = sample.finished if sample is not None else None
        if finished is not None and finished.reason != "abort":
            if (token_ids, finished.reason) != (wanted, reason):
                wrong.append(
                    f"sample {index} got {len(token_ids)} tokens, {finished.reason}; not {len(wanted)}, {reason}"
                )
        elif token_ids != wanted[: len(token_ids)]:
            wrong.append(f"sample {index} got other tokens than the model's definition gives")
        if is_finished and finished is None:
            wrong.append(f"sample {index} has no end in a stream that ended well")
        # Without a client that asked for it, only a client that was gone too long ends so.
        if finished is not None and finished.reason == "abort" and not is_aborting and request.detach_grace_s:
            wrong.append(f"sample {index} was aborted, and nobody asked for that")
    if is_finished and transcript.done is None:
        wrong.append("a stream ended well without its last event")
    return wrong


class Traffic:
    """So many clients that send one random request after another."""

    def __init__(self, client: AsyncClient, judge: Judge, *, num_clients: int, seed: int) -> None:
        self.outcomes: Counter[str] = Counter()
        self.num_started = 0
        self.num_tokens = 0
        self.wrong: list[str] = []
        self._client = client
        self._judge = judge
        self._source = random.Random(seed)
        self._templates = [Template.random(self._source) for _ in range(24)]
        self._is_ending = False
        self._tasks = [asyncio.create_task(self._one_client(number)) for number in range(num_clients)]

    async def _one_client(self, number: int) -> None:
        while not self._is_ending:
            await self._one_request()
            await asyncio.sleep(self._source.uniform(0, 0.05))

    async def _one_request(self) -> Outcome:
        self.num_started += 1
        request = Request.random(self.num_started, self._templates, self._source)
        outcome = await run_request(self._client, request, self._judge)
        self.outcomes[outcome.kind] += 1
        self.num_tokens += outcome.num_tokens
        self.wrong += outcome.wrong
        if outcome.status is not None:
            await asyncio.sleep(0.1)  # as clients do that were told to come back
        return outcome

    async def end(self) -> None:
        """Send no more, and wait for what runs."""
        self._is_ending = True
        await asyncio.gather(*self._tasks)

    async def all_finish(self, count: int) -> list[str]:
        """Send requests that nobody disturbs; return what went wrong with them."""
        before = len(self.wrong)
        for _ in range(count):
            request = Request.random(self.num_started, self._templates, self._source)
            request.deadline_s = request.cancel_after = request.abort_after = None
            request.request_id = f"calm-{self.num_started}"
            self.num_started += 1
            outcome = await run_request(self._client, request, lambda *_: "nothing disturbed it")
            self.outcomes[outcome.kind] += 1
            self.wrong += outcome.wrong
        return self.wrong[before:]
