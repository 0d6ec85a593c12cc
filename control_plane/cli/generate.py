"""``maniple generate``: continue a text and stream the answer to standard output."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import Any

from control_plane.cli.connection import (
    add_sampling_flags,
    add_server_flag,
    open_client,
    report,
    sampling_options,
    server_address,
)
from control_plane.cli.number_flags import LONGEST_S, number, whole
from control_plane.exit_codes import FAILURE, INTERRUPTED, OK, USAGE
from maniple_client import Chunk, Done, GenerationStream, ManipleError
from service_chassis.command_parser import CommandParser
from service_chassis.settings import above

EPILOG = """\
Examples:
  maniple generate "Once upon a time" --max-tokens 64
  echo "Summarise: ..." | maniple generate - --temperature 0
  maniple generate --chat "Why is the sky blue?" --stats
  maniple generate --token-ids 1,2,3 --json
"""


def parser() -> argparse.ArgumentParser:
    made = CommandParser(
        prog="maniple generate",
        usage="maniple generate [FLAGS] [TEXT]",
        description="Continue a text and stream the answer.",
        epilog=EPILOG,
    )
    made.add_argument("prompt", nargs="?", metavar="TEXT", help="the text; - reads standard input")
    made.add_argument("--chat", action="store_true", help="the text is a user's message, not the beginning of a text")
    made.add_argument("--token-ids", metavar="IDS", help="continue these ids, separated by commas, instead of a text")
    add_server_flag(made)
    made.add_argument("--model", default="", metavar="NAME", help="a served model name")
    made.add_argument("--n", type=whole(1), metavar="N", help="draw N samples; they are printed when all have ended")
    made.add_argument(
        "--timeout-s",
        type=number(above(0, at_most=LONGEST_S)),
        metavar="SECONDS",
        help="the deadline of the request",
    )
    made.add_argument("--json", action="store_true", help="print every event as a line of JSON")
    made.add_argument("--stats", action="store_true", help="print times and tokens on standard error at the end")
    add_sampling_flags(made)
    return made


def run(argv: Sequence[str]) -> int:
    made = parser()
    arguments = made.parse_args(argv)
    if (arguments.prompt is None) == (arguments.token_ids is None):
        made.print_usage(sys.stderr)
        print("maniple generate: give either a text or --token-ids", file=sys.stderr)
        return USAGE
    options: dict[str, Any] = sampling_options(arguments)
    if arguments.n is not None:
        options["n"] = arguments.n
    if arguments.token_ids is not None:
        try:
            options["token_ids"] = [int(word) for word in arguments.token_ids.split(",")]
        except ValueError:
            print("maniple generate: --token-ids takes whole numbers separated by commas", file=sys.stderr)
            return USAGE
    else:
        text = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
        options |= {"messages": [{"role": "user", "content": text}]} if arguments.chat else {"prompt": text}
    address = server_address(arguments)
    with open_client(arguments, "maniple generate") as client:
        try:
            stream = client.generate(model=arguments.model, timeout_s=arguments.timeout_s, **options)
        except ValueError as error:  # a number that no message can hold
            print(f"maniple generate: {error}", file=sys.stderr)
            return USAGE
        with stream:
            try:
                return _show(stream, arguments)
            except ManipleError as error:
                _end_line(stream, arguments)
                return report("maniple generate", error, address)
            except KeyboardInterrupt:
                _end_line(stream, arguments)
                return INTERRUPTED


def _show(stream: GenerationStream, arguments: argparse.Namespace) -> int:
    several = (arguments.n or 1) > 1
    for event in stream:
        if arguments.json:
            print(json.dumps({"event": type(event).__name__.lower(), **dataclasses.asdict(event)}), flush=True)
        elif isinstance(event, Chunk) and not several:
            print(event.text, end="", flush=True)
    transcript = stream.transcript
    if several and not arguments.json:
        for index, sample in sorted(transcript.samples.items()):
            print(f"--- sample {index}\n{sample.text}")
    elif not arguments.json:
        print()
    if arguments.stats and transcript.done is not None:
        print(stats_line(transcript.done), file=sys.stderr)
    # A sample that somebody aborted is not the answer that was asked for.
    aborted = any(sample.finished and sample.finished.reason == "abort" for sample in transcript.samples.values())
    return FAILURE if aborted else OK


def _end_line(stream: GenerationStream, arguments: argparse.Namespace) -> None:
    """End the line of an answer that was cut. Where none is on standard output, nothing is added to it."""
    text_was_shown = any(sample.text for sample in stream.transcript.samples.values())
    if text_was_shown and not arguments.json and (arguments.n or 1) == 1:
        print(flush=True)


def stats_line(done: Done) -> str:
    """Return what a generation took, for people."""
    rest_s = done.duration_s - done.time_to_first_token_s
    further = done.num_output_tokens - 1  # the first token's time is told apart
    known = done.time_to_first_token_s > 0  # else another control plane sent it
    first = f", first token after {done.time_to_first_token_s * 1000:.0f} ms" if known else ""
    rate = f", then {further / rest_s:.1f} tokens/s" if known and further > 0 and rest_s > 0 else ""
    return (
        f"[{done.num_prompt_tokens} prompt tokens ({done.num_cached_tokens} cached), {done.num_output_tokens} output "
        f"tokens{first}{rate}]"
    )
