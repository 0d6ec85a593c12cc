"""Run an engine over a real group of the scripted model in this process, without doors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from control_plane.assembly import build_engine, build_group
from control_plane.config import ControlPlaneConfig, resolve_auto
from control_plane.delta_recorder import DeltaRecorder
from control_plane.engine import Engine
from control_plane.engine_status import RequestIds
from control_plane.generation import (
    Chunk,
    Done,
    Event,
    Generation,
    PromptLogprobs,
    SampleFinished,
    SamplingChoice,
    Started,
    TextChoice,
)
from control_plane.generation_stream import GenerationStream
from control_plane.metrics.meters import GroupMeters
from control_plane.request_spans import RequestSpans
from control_plane.step_trace import GroupTrace
from control_plane.structured_output.compiler import GrammarCompiler
from control_plane.text.model_text import load_model_text
from service_chassis.ids import RequestId
from service_chassis.protocol.logprobs import Logprobs

END = 256  # end of text of the scripted model's byte vocabulary


def scripted(**options: Any) -> str:
    """Return the model string of the scripted model with options."""
    return "scripted:" + json.dumps(options) if options else "scripted"


@asynccontextmanager
async def running_engine(
    model: str = "scripted",
    *,
    ids: RequestIds | None = None,
    grammars: GrammarCompiler | None = None,
    trace: GroupTrace | None = None,
    meters: GroupMeters | None = None,
    spans: RequestSpans | None = None,
    recorder: DeltaRecorder | None = None,
    **config: Any,
) -> AsyncIterator[Engine]:
    """Form a group, run an engine on it, and check the books when the block ends.

    ``grammars`` stay open, for several engines one after another; without them the engine has its own. So does
    what watches it, if anything does.
    """
    # One thread: tests run side by side, and threads of one step that wait for each other crawl on shared cores.
    config = {"executor": "uni", "device": "cpu", "num_threads": 1, **config}
    resolved = resolve_auto(ControlPlaneConfig(model=model, **config), has_gpu=False, on_terminal=False)
    group = build_group(resolved, model, "", trace=trace, recorder=recorder)
    facts = await group.form()
    text = load_model_text(model)
    own = GrammarCompiler(lambda: text)
    engine = build_engine(
        resolved,
        group,
        facts,
        text.tokenizer,
        ids,
        grammars=grammars or own,
        trace=trace,
        meters=meters,
        spans=spans,
    )
    loop = asyncio.create_task(engine.run())
    try:
        yield engine
        # It ends of itself when it has gone to the next owner, or when the test ended it while the group lived on.
        may_have_ended = engine._has_failed and group.loss is None
        assert not loop.done() or (may_have_ended and not loop.exception()), loop.exception()
    finally:
        loop.cancel()
        await asyncio.gather(loop, return_exceptions=True)
        await own.close()
        await group.teardown("the test is over")
    engine.check_integrity()


@dataclass
class Collected:
    """Everything that one stream brought."""

    started: Started | None = None
    token_ids: dict[int, list[int]] = field(default_factory=dict)  # sample index -> ids
    text: dict[int, str] = field(default_factory=dict)
    finished: dict[int, SampleFinished] = field(default_factory=dict)
    logprobs: dict[int, Logprobs] = field(default_factory=dict)
    prompt_logprobs: list[Logprobs] = field(default_factory=list)
    done: Done | None = None

    def take(self, event: Event) -> None:
        """Note what an event brings."""
        match event:
            case Started():
                assert self.started is None
                self.started = event
            case PromptLogprobs():
                assert not self.token_ids
                self.prompt_logprobs.append(event.columns)
            case Chunk():
                assert event.index not in self.finished
                self.token_ids.setdefault(event.index, []).extend(event.token_ids)
                self.text[event.index] = self.text.get(event.index, "") + event.text
                if event.logprobs is not None:
                    assert len(event.logprobs) == len(event.token_ids)
                    self.logprobs.setdefault(event.index, Logprobs(event.logprobs.width)).extend(event.logprobs)
            case SampleFinished():
                assert event.index not in self.finished
                self.finished[event.index] = event
            case Done():
                self.done = event


async def collect(stream: GenerationStream) -> Collected:
    """Read a stream to its end."""
    got = Collected()
    async for event in stream:
        got.take(event)
    return got


def generation(
    request_id: str, prompt: Sequence[int], *, text: TextChoice | None = None, **sampling: Any
) -> Generation:
    """Return a request; greedy and without an end of text unless ``sampling`` says otherwise."""
    of_generation = {
        name: sampling.pop(name)
        for name in ("priority", "cache_namespace", "skip_reading_prefix_cache", "deadline")
        if name in sampling
    }
    return Generation(
        request_id=RequestId(request_id),
        prompt_token_ids=tuple(prompt),
        sampling=SamplingChoice(**{"temperature": 0.0, "max_tokens": 8, **sampling}),
        text=text or TextChoice(skip_text=True),
        **of_generation,
    )
