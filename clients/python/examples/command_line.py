"""The command line that the example programs share, and how they show what happens."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from attempts import Again

from maniple.v1 import admin_pb2
from maniple_client import Chunk, Done, Event, Finished, ManipleError, Started, Tls, token_in


def parse(name: str) -> argparse.Namespace:
    """Read verb and flags."""
    words = argparse.ArgumentParser(name, description="Stream a generation from a Maniple server.")
    words.add_argument("verb", choices=["generate", "abort", "tokenize", "model", "status"])
    words.add_argument("argument", nargs="?", help="abort ID, tokenize TEXT")
    add = words.add_argument
    server = os.environ.get("MANIPLE_SERVER") or "127.0.0.1:50051"
    add(
        "--target",
        default=server,
        metavar="HOST:PORT",
        help="the server, or several with commas (default: %(default)s)",
    )
    add("--prompt", metavar="TEXT", default="", help="text to continue")
    add("--token-ids", metavar="IDS", type=_ids, help="ids to continue, with commas")
    add("--request-id", metavar="ID", default="", help="id of the request (default: drawn)")
    add("--max-tokens", metavar="N", type=int, default=64, help="of output, at the most (default: %(default)s)")
    add("--temperature", metavar="T", type=float, help="0 is greedy (default: the server's)")
    add("--seed", metavar="N", type=int, help="fixes what is sampled")
    add("--ignore-eos", action="store_true", help="go on after the end of text")
    add("--deadline", metavar="S", type=float, help="end the request after so many seconds")
    add("--cancel-after", metavar="N", type=int, default=0, help="cancel after so many tokens")
    add(
        "--retry-for",
        metavar="S",
        type=float,
        default=30.0,
        help="give up after so many seconds without a word (default: %(default)s)",
    )
    add(
        "--start-over",
        metavar="N",
        type=int,
        default=1,
        help="begin anew so often when what had begun is lost (default: %(default)s)",
    )
    add("--detach-grace", metavar="S", type=float, default=0.0, help="go on so many seconds without a connection")
    add("--tls-ca", metavar="FILE", help="use TLS, and trust the certificates in this file")
    add("--token-file", metavar="FILE", help="send the bearer token in this file (needs --tls-ca)")
    add("--json", action="store_true", help="print one JSON object a line")
    flags = words.parse_args()
    if flags.token_file and not flags.tls_ca:
        words.error("--token-file needs --tls-ca")
    return flags


def _ids(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def connection(flags: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of ``Client`` beside its address. Files are read again when they are replaced."""
    return {
        "tls": Tls(ca=flags.tls_ca) if flags.tls_ca else None,
        "token": token_in(flags.token_file) if flags.token_file else None,
        "resume_for_s": flags.retry_for,
    }


def generate_options(flags: argparse.Namespace, request_id: str) -> dict[str, Any]:
    """Return the arguments of ``Client.generate``."""
    options: dict[str, Any] = {"request_id": request_id, "max_tokens": flags.max_tokens}
    options |= {"ignore_eos": flags.ignore_eos, "detach_grace_s": flags.detach_grace}
    options |= {name: getattr(flags, name) for name in ("temperature", "seed") if getattr(flags, name) is not None}
    return options | ({"token_ids": flags.token_ids} if flags.token_ids is not None else {"prompt": flags.prompt})


def status_facts(status: admin_pb2.GetStatusResponse) -> dict[str, Any]:
    """Return what is worth a line of what a server says of itself."""
    return {
        "ready": status.ready,
        "why_not": status.not_ready_reason,
        "num_running": sum(group.num_running for group in status.groups),
        "num_waiting": sum(group.num_waiting for group in status.groups),
    }


class Printer:
    """Text to standard output and the rest to standard error, or everything as JSON lines."""

    def __init__(self, as_json: bool) -> None:
        self._json = as_json

    def event(self, event: Event) -> None:
        match event:
            case Started():
                facts = {"request_id": event.request_id, "num_prompt_tokens": event.num_prompt_tokens}
                self._line("started", num_cached_tokens=event.num_cached_tokens, **facts)
            case Chunk():
                self._line("chunk", index=event.index, token_ids=event.token_ids, text=event.text)
                self._text(event.text)
            case Finished():
                counts = {"index": event.index, "num_output_tokens": event.num_output_tokens}
                self._line("finished", reason=event.reason, **counts)
            case Done():
                self._line("done", num_output_tokens=event.num_output_tokens, duration_s=event.duration_s)
                self._text("\n")

    def again(self, error: ManipleError, again: Again) -> None:
        self._line(again.what, delay_s=again.delay_s, **_facts(error))
        if not self._json:
            print(f"\n[{error}: {again.what.replace('_', ' ')} in {again.delay_s:.2f} s]", file=sys.stderr)

    def answer(self, event: str, **facts: object) -> None:
        self._line(event, **facts)
        if not self._json:
            for name, value in facts.items():
                print(f"{name}: {value}")

    def failed(self, error: ManipleError) -> None:
        self._line("error", **_facts(error))
        if not self._json:
            print(f"\n{error}", file=sys.stderr)

    def _text(self, text: str) -> None:
        if not self._json:
            print(text, end="", flush=True)

    def _line(self, event: str, **facts: object) -> None:
        if self._json:
            print(json.dumps({"event": event, **facts}), flush=True)


def _facts(error: ManipleError) -> dict[str, Any]:
    violations: Sequence[dict[str, str]] = [
        {"field": one.field, "description": one.description} for one in error.field_violations
    ]
    facts = {"status": error.code.name, "reason": error.reason, "message": error.message}
    return {**facts, "violations": violations, "incident_id": error.incident_id}
