"""What all streaming doors do around a generation: admit it, pass its events on, and free it whatever happens."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import grpc
import structlog

from control_plane.doors.converters import CallFacts
from control_plane.generation import Event, Generation, Started, Waiting
from control_plane.generation_stream import GenerationStream
from service_chassis.auth import current_caller
from service_chassis.errors import ManipleError, reason_name
from service_chassis.telemetry import trace_id_of

if TYPE_CHECKING:
    from control_plane.fleet import Fleet

Context = grpc.aio.ServicerContext[Any, Any]


def call_facts(context: Context, fleet: Fleet, *, client_resumes: bool = False) -> CallFacts:
    """Read deadline, caller and trace of a call; ``client_resumes`` is the door's to say."""
    remaining = context.time_remaining()
    traceparent = ""
    for key, value in context.invocation_metadata() or ():
        if key == "traceparent":
            traceparent = value if isinstance(value, str) else value.decode("ascii", "replace")
    if trace_id := trace_id_of(traceparent):
        structlog.contextvars.bind_contextvars(trace_id=trace_id)  # to what this call's task logs
    return CallFacts(
        deadline=None if remaining is None else fleet.now() + remaining,
        client_identity=current_caller().identity,
        traceparent=traceparent,
        client_resumes=client_resumes,
    )


async def events(fleet: Fleet, generation: Generation, context: Context) -> AsyncGenerator[Event, None]:
    """Admit a generation and yield its events; it is cancelled when this is closed early."""
    async with aclosing(stream_events(await admit(fleet, generation), context)) as all_events:
        async for event in all_events:
            yield event


async def admit(fleet: Fleet, generation: Generation) -> GenerationStream:
    """Let a request of the present caller in, where its share has room for one more. Every door comes through here."""
    try:
        fleet.check_share(current_caller())
        return await fleet.generate(generation)
    except ManipleError as error:
        fleet.num_refused[reason_name(error.reason)] += 1
        raise


async def stream_events(stream: GenerationStream, context: Context) -> AsyncGenerator[Event, None]:
    """Yield the events of a stream; it is cancelled when this is closed early.

    Initial metadata leaves with ``Started``: until then a proxy may still retry the call elsewhere, afterwards never.
    Of a request that waits for long it leaves with the first ``Waiting``, or the proxy would end it.
    """
    has_begun = False
    async with aclosing(read_events(stream)) as all_events:
        async for event in all_events:
            if not has_begun and isinstance(event, Started | Waiting):
                has_begun = True
                await context.send_initial_metadata(())
            yield event


async def read_events(stream: GenerationStream) -> AsyncGenerator[Event, None]:
    """Yield the events of a stream that is one of several in its call; it is cancelled when this is closed early."""
    try:
        async for event in stream:
            yield event
    finally:
        # Also when the client went away or its deadline passed: grpc cancels the handler, which closes this.
        stream.cancel()
