"""Tell OpenTelemetry of a request when it has ended: one span for all of it, in it queue, prefill and decode.

The parent is the span of the client's call. Nothing is kept or sent while a request runs, so that a step costs the same
with and without; the steps a request took part in are two numbers. No prompts, no outputs.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from control_plane.live_request import LiveRequest
from service_chassis.errors import ManipleError, reason_name

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer
    from opentelemetry.util.types import AttributeValue

_STEPS = ("maniple.step.first", "maniple.step.last")


class RequestSpans:
    """Makes spans of requests that ended. Event loop."""

    def __init__(self, tracer: Tracer, model_name: str) -> None:
        """Take a tracer, whose sampler decides which requests are told of."""
        self._tracer = tracer
        self._model_name = model_name

    def record(self, live: LiveRequest, error: ManipleError | None, ended_at: float, steps: tuple[int, int]) -> None:
        """Tell of a request that ended.

        Args:
            live: as it ended.
            error: how, if it was badly.
            ended_at: monotonic, seconds.
            steps: the first and the last step of the group with it; 0: not known.
        """
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        ahead_ns = time.time_ns() - time.monotonic_ns()

        def wall_ns(at: float) -> int:
            return int(at * 1e9) + ahead_ns

        operation = "text_completion" if live.generation.pooling is None else "embeddings"
        parent = TraceContextTextMapPropagator().extract({"traceparent": live.generation.traceparent})
        whole = self._tracer.start_span(
            f"{operation} {self._model_name}",
            parent,
            SpanKind.SERVER,
            start_time=wall_ns(live.arrived_at),
        )
        if not whole.is_recording():
            return
        whole.set_attributes(self._attributes(live, operation))
        whole.set_attributes({name: step for name, step in zip(_STEPS, steps, strict=True) if step})
        if error is not None:
            whole.set_attribute("error.type", reason_name(error.reason))
            whole.set_status(Status(StatusCode.ERROR, reason_name(error.reason)))
        inside = set_span_in_context(whole)
        moments = (live.arrived_at, live.started_at, live.first_token_at, ended_at)
        for index, name in enumerate(("queue", "prefill", "decode")):
            began = moments[index]
            if began is None:
                break
            ended = next(at for at in moments[index + 1 :] if at is not None)
            self._tracer.start_span(name, inside, start_time=wall_ns(began)).end(wall_ns(ended))
        whole.end(wall_ns(ended_at))

    def _attributes(self, live: LiveRequest, operation: str) -> Mapping[str, AttributeValue]:
        """Return what is said of it, under the names of OpenTelemetry's conventions where they have one."""
        generation, sampling = live.generation, live.generation.sampling
        found: dict[str, AttributeValue] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "maniple",
            "gen_ai.request.model": self._model_name,
            "gen_ai.response.model": self._model_name,
            "gen_ai.response.id": generation.request_id,
            "gen_ai.usage.input_tokens": len(generation.prompt_token_ids),
            "gen_ai.usage.cache_read.input_tokens": live.num_cached_tokens,
        }
        if generation.pooling is not None:
            return found
        found |= {
            "gen_ai.request.max_tokens": sampling.max_tokens,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.choice.count": sampling.n,
            "gen_ai.usage.output_tokens": live.num_output_tokens,
            "gen_ai.response.finish_reasons": [one.reason.value for one in live.samples if one.reason is not None],
        }
        if (ttft_s := live.time_to_first_token_s) is not None:
            found["gen_ai.response.time_to_first_chunk"] = ttft_s
        return found
