"""``maniple status``: what a server is doing, once or live."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from control_plane.cli.connection import add_server_flag, open_client, report, server_address
from control_plane.cli.number_flags import LONGEST_S, number
from control_plane.exit_codes import FAILURE, INTERRUPTED, OK
from maniple.v1 import admin_pb2
from maniple_client import Client, ManipleError
from service_chassis.command_parser import CommandParser
from service_chassis.settings import at_least

if TYPE_CHECKING:
    from rich.table import Table


def parser() -> argparse.ArgumentParser:
    made = CommandParser(
        prog="maniple status",
        usage="maniple status [FLAGS]",
        description="Say what a server is doing: model, groups, epoch, step, requests, blocks, rates.",
        epilog="Exit code 0: the server accepts requests; 1: it does not, or only passes them on as a spare, or\n"
        "nobody answers.\n\n"
        "Examples:\n  maniple status\n  maniple status --watch\n  maniple status --json | jq .groups[0].step",
    )
    add_server_flag(made)
    made.add_argument(
        "--json",
        action="store_true",
        help="print JSON, one line an answer; names and values of maniple.v1.GetStatusResponse",
    )
    made.add_argument("--watch", action="store_true", help="ask again and again until Ctrl-C")
    made.add_argument(
        "--interval-s",
        type=number(at_least(0.01, at_most=LONGEST_S)),
        default=1.0,
        metavar="SECONDS",
        help="between two answers (default 1)",
    )
    return made


def run(argv: Sequence[str]) -> int:
    arguments = parser().parse_args(argv)
    address = server_address(arguments)
    with open_client(arguments, "maniple status") as client:
        try:
            if not arguments.watch:
                status = client.status()
                print(as_json(status) if arguments.json else as_text(status, address))
                return OK if status.ready else FAILURE
            if sys.stdout.isatty() and not arguments.json:
                return _watch_live(client, address, arguments.interval_s)
            while True:
                status = client.status()
                print(as_json(status) if arguments.json else as_text(status, address), flush=True)
                time.sleep(arguments.interval_s)
        except ManipleError as error:
            return report("maniple status", error, address)
        except KeyboardInterrupt:
            return INTERRUPTED


def _watch_live(client: Client, address: str, interval_s: float) -> int:
    from rich.live import Live

    with Live(screen=False, auto_refresh=False) as live:
        while True:
            try:
                live.update(table(rows(client.status(), address)), refresh=True)
            except ManipleError as error:
                # A server that restarts comes back by itself.
                live.update(table([("server", address), ("state", f"no answer: {error.message}")]), refresh=True)
            time.sleep(interval_s)


def table(facts: list[tuple[str, str]]) -> Table:
    """Lay out what ``rows`` returns, for a terminal."""
    from rich.table import Table

    grid = Table.grid(padding=(0, 2))
    for name, value in facts:
        grid.add_row(f"[bold]{name}[/bold]" if name else "", value)
    return grid


def rows(status: admin_pb2.GetStatusResponse, address: str) -> list[tuple[str, str]]:
    """Return what there is to say, as (name, value) in the order of interest."""
    state = "ready" if status.ready else f"not ready: {status.not_ready_reason}"
    hits, queries = status.prefix_cache_hits, status.prefix_cache_queries
    facts = [
        ("server", f"{address}, {state}, up {_duration(status.uptime_s)}, version {status.version}"),
        ("model", status.model),
        (
            "last 10 s",
            f"{status.prompt_tokens_per_s:.0f} prompt tokens/s, {status.output_tokens_per_s:.0f} output tokens/s, "
            f"{status.steps_per_s:.1f} steps/s",
        ),
        (
            "since start",
            f"{status.num_finished} requests finished, prefix cache found {hits} of {queries} tokens"
            + (f" ({100 * hits / queries:.0f} %)" if queries else ""),
        ),
    ]
    for group in status.groups:
        reason = f" ({group.reason})" if group.reason else ""
        facts += [
            (f"group {group.name}", f"{group.state}{reason}, epoch {group.epoch}, step {group.step}"),
            ("  requests", f"{group.num_running} running, {group.num_waiting} waiting"),
            (
                "  blocks",
                f"{group.num_free_blocks} free, {group.num_cached_blocks} cached, of {group.num_total_blocks} "
                f"with {group.block_size} tokens each; {group.num_preemptions} preemptions",
            ),
        ]
        facts += [
            (
                f"  rank {rank.rank}",
                f"{rank.address or 'in this process'}{f', pid {rank.pid}' if rank.pid else ''}, "
                f"accepted {rank.accepted}, completed {rank.completed}, heard {rank.silent_for_s:.1f} s ago",
            )
            for rank in group.ranks
        ]
    return facts


def as_text(status: admin_pb2.GetStatusResponse, address: str) -> str:
    facts = rows(status, address)
    width = max(len(name) for name, _ in facts)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in facts)


def as_json(status: admin_pb2.GetStatusResponse) -> str:
    from google.protobuf.json_format import MessageToDict

    shown = MessageToDict(status, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    _make_numbers(status.DESCRIPTOR, shown)
    return json.dumps(shown)


_WHOLE = (FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64)


def _make_numbers(descriptor: Descriptor, shown: dict[str, Any]) -> None:
    """Turn the 64-bit numbers in ``shown`` into numbers. Protobuf writes them as strings, for JavaScript's sake."""
    for field in descriptor.fields:
        value = shown.get(field.name)
        if value is None:
            continue
        if field.cpp_type in _WHOLE:
            shown[field.name] = [int(one) for one in value] if isinstance(value, list) else int(value)
        elif field.message_type is not None:
            for one in value if isinstance(value, list) else [value]:
                _make_numbers(field.message_type, one)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
