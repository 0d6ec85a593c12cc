"""Spans of requests: what an exporter gets, and what arrives at a collector over OTLP."""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import error_attributes, gen_ai_attributes
from opentelemetry.trace import SpanKind, StatusCode

from control_plane.generation import Generation
from control_plane.request_spans import RequestSpans
from control_plane.span_export import SpanExport
from support.engine_harness import collect, generation, running_engine, scripted

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
SPAN_ID = "00f067aa0ba902b7"
PROMPT = [5, 250, 17]


def traced(request_id: str, flags: str = "01", **sampling: Any) -> Generation:
    return replace(generation(request_id, PROMPT, **sampling), traceparent=f"00-{TRACE_ID}-{SPAN_ID}-{flags}")


class Kept:
    """Spans that were exported, by name."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.spans = RequestSpans(provider.get_tracer("t"), "m")

    def by_name(self) -> dict[str, ReadableSpan]:
        spans = self._exporter.get_finished_spans()
        found = {span.name: span for span in spans}
        assert len(found) == len(spans)
        return found


async def test_spans_of_a_request_follow_each_other_below_the_clients() -> None:
    kept = Kept()
    async with running_engine(scripted(step_time_s=0.01), spans=kept.spans) as engine:
        await collect(await engine.generate(generation("before", PROMPT, max_tokens=2)))
        first = engine.status().step + 1
        kept._exporter.clear()
        await collect(await engine.generate(traced("r", max_tokens=6, temperature=0.0)))
    found = kept.by_name()
    assert set(found) == {"text_completion m", "queue", "prefill", "decode"}
    whole = found["text_completion m"]
    context = whole.get_span_context()
    assert context is not None
    assert f"{context.trace_id:032x}" == TRACE_ID
    assert whole.parent is not None
    assert f"{whole.parent.span_id:016x}" == SPAN_ID
    assert whole.kind is SpanKind.SERVER
    assert whole.status.status_code is StatusCode.UNSET
    parts = [found[name] for name in ("queue", "prefill", "decode")]
    assert all(part.parent == context for part in parts)
    assert [part.start_time for part in parts] == [whole.start_time, parts[0].end_time, parts[1].end_time]
    assert parts[2].end_time == whole.end_time
    decode = parts[2]
    assert decode.end_time is not None
    assert decode.start_time is not None
    assert decode.end_time - decode.start_time >= 4 * 10**7  # five more tokens, less a step's worth of doubt
    known = gen_ai_attributes
    facts = dict(whole.attributes or {})
    assert facts[known.GEN_AI_USAGE_INPUT_TOKENS] == len(PROMPT)
    assert facts[known.GEN_AI_USAGE_OUTPUT_TOKENS] == 6
    assert facts[known.GEN_AI_RESPONSE_FINISH_REASONS] == ("length",)
    assert facts[known.GEN_AI_REQUEST_MAX_TOKENS] == 6
    assert (facts.pop("maniple.step.first"), facts.pop("maniple.step.last")) == (first, first + 5)
    names = {value for name, value in vars(known).items() if name.isupper()}
    assert set(facts) <= names  # nothing under a name that the conventions do not have


async def test_request_that_fails_or_never_starts_says_so_in_its_span() -> None:
    kept = Kept()
    async with running_engine(scripted(step_time_s=0.01), max_num_seqs=1, spans=kept.spans) as engine:
        running = await engine.generate(generation("running", PROMPT, max_tokens=1000))
        await anext(aiter(running))
        waiting = await engine.generate(traced("waiting"))
        waiting.cancel()
        assert set(kept.by_name()) == {"text_completion m", "queue"}
        whole = kept.by_name()["text_completion m"]
        assert whole.status.status_code is StatusCode.ERROR
        assert (whole.attributes or {})[error_attributes.ERROR_TYPE] == "CANCELLED"
        assert "maniple.step.first" not in (whole.attributes or {})
        running.cancel()


async def test_request_whose_client_does_not_sample_makes_no_spans() -> None:
    kept = Kept()
    async with running_engine(spans=kept.spans) as engine:
        await collect(await engine.generate(traced("r", flags="00")))
    assert kept.by_name() == {}


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.requests: list[trace_service_pb2.ExportTraceServiceRequest] = []

    def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        self.requests.append(request)
        return trace_service_pb2.ExportTraceServiceResponse()


async def test_spans_reach_a_collector_before_the_process_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    collector, server = Collector(), grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    monkeypatch.setitem(os.environ, "OTEL_SERVICE_NAME", "chat-backend")
    export = SpanExport(f"http://127.0.0.1:{port}", version="9")
    try:
        async with running_engine(spans=RequestSpans(export.tracer, "m")) as engine:
            await collect(await engine.generate(traced("r")))
        await asyncio.to_thread(export.close)
    finally:
        server.stop(0).wait()
    [resource] = [one for request in collector.requests for one in request.resource_spans]
    told = {one.key: one.value.string_value for one in resource.resource.attributes}
    assert (told["service.name"], told["service.version"]) == ("chat-backend", "9")
    spans = resource.scope_spans[0].spans
    assert {span.name for span in spans} == {"text_completion m", "queue", "prefill", "decode"}
    assert {span.trace_id.hex() for span in spans} == {TRACE_ID}
