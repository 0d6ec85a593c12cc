"""Maniple from the command line, with the client for asyncio.

Run it with ``python clients/python/examples/async_client.py generate --prompt "Once upon a time"``.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time

from attempts import Attempts
from command_line import Printer, connection, generate_options, parse, status_facts

from maniple_client import AsyncClient, Chunk, ManipleError


async def generate(client: AsyncClient, flags: argparse.Namespace, printer: Printer) -> None:
    """Stream a generation. The client resumes it; what it cannot resume is begun anew here."""
    attempts = Attempts(request_id=flags.request_id, retry_for_s=flags.retry_for, starts_over=flags.start_over)
    deadline = None if flags.deadline is None else time.monotonic() + flags.deadline
    while True:
        left_s = None if deadline is None else max(deadline - time.monotonic(), 0.001)
        async with client.generate(timeout_s=left_s, **generate_options(flags, attempts.request_id)) as stream:
            try:
                num_tokens = 0
                async for event in stream:
                    attempts.heard()
                    printer.event(event)
                    num_tokens += len(event.token_ids) if isinstance(event, Chunk) else 0
                    if 0 < flags.cancel_after <= num_tokens:
                        stream.close()
                        if flags.detach_grace:  # it would go on without a connection
                            await client.abort(attempts.request_id)
                        printer.answer("cancelled")
                        return
                return
            except ManipleError as error:
                again = attempts.after(error, time.monotonic(), begun=stream.transcript.started is not None)
                if again is None or (deadline is not None and time.monotonic() + again.delay_s >= deadline):
                    raise
                printer.again(error, again)
        await asyncio.sleep(again.delay_s)


async def run(client: AsyncClient, flags: argparse.Namespace, printer: Printer) -> None:
    """Do what the verb says."""
    match flags.verb:
        case "generate":
            await generate(client, flags, printer)
        case "abort":
            printer.answer("aborted", was_running=await client.abort(flags.argument))
        case "tokenize":
            printer.answer("tokens", token_ids=await client.tokenize(flags.argument))
        case "model":
            model = await client.get_model()
            limits = {"max_model_len": model.max_model_len, "vocab_size": model.vocab_size}
            printer.answer("model", names=list(model.served_names), **limits)
        case "status":
            printer.answer("status", **status_facts(await client.status()))


async def main() -> int:
    flags = parse("async_client.py")
    printer = Printer(flags.json)
    async with AsyncClient(flags.target.split(","), **connection(flags)) as client:
        try:
            await run(client, flags, printer)
        except ManipleError as error:
            printer.failed(error)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
