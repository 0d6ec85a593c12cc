"""``maniple chat``: a conversation. Ctrl-C ends the answer and not the program."""

from __future__ import annotations

import argparse
import io
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
from control_plane.cli.generate import stats_line
from control_plane.exit_codes import OK
from maniple_client import Chunk, Client, ManipleError, TransportLost
from service_chassis.command_parser import CommandParser

HELP = """\
/reset        forget the conversation
/system TEXT  forget it, and begin with TEXT as the system's message
/quit         leave (also Ctrl-D)
Ctrl-C        end the answer that is being written"""


def parser() -> argparse.ArgumentParser:
    made = CommandParser(
        prog="maniple chat",
        usage="maniple chat [FLAGS]",
        description="Talk to the model. The conversation is kept until /reset.",
        epilog=f"While it runs:\n{HELP}\n\nWithout a terminal every line of standard input is one message.",
    )
    add_server_flag(made)
    made.add_argument("--model", default="", metavar="NAME", help="a served model name")
    made.add_argument("--system", metavar="TEXT", help="the system's message")
    made.add_argument("--stats", action="store_true", help="print times and tokens after every answer")
    add_sampling_flags(made)
    return made


class Conversation:
    """What was said so far, and the asking of the next thing."""

    def __init__(self, client: Client, options: dict[str, Any], *, system: str | None, show_stats: bool) -> None:
        self._client = client
        self._options = options
        self._show_stats = show_stats
        self.messages: list[dict[str, str]] = []
        self.reset(system)

    def reset(self, system: str | None = None) -> None:
        """Forget everything but the system's message, ``system`` where given."""
        kept = [message for message in self.messages if message["role"] == "system"]
        self.messages = [{"role": "system", "content": system}] if system else kept

    def ask(self, text: str) -> None:
        """Send one message and stream the answer to standard output. Raises ``ManipleError``; then nothing was said."""
        asked = [*self.messages, {"role": "user", "content": text}]
        with self._client.generate(messages=asked, **self._options) as stream:
            try:
                for event in stream:
                    if isinstance(event, Chunk):
                        print(event.text, end="", flush=True)
                print()
            except KeyboardInterrupt:
                print(" [stopped]")
            except ManipleError:
                if any(sample.text for sample in stream.transcript.samples.values()):
                    print(flush=True)  # what follows is said on a line of its own
                raise
        samples = stream.transcript.samples
        answer = samples[0].text if 0 in samples else ""
        # A cut answer stays: both sides saw it, and templates want turns to alternate.
        self.messages = [*asked, {"role": "assistant", "content": answer}]
        if self._show_stats and stream.transcript.done is not None:
            print(stats_line(stream.transcript.done), file=sys.stderr)


def run(argv: Sequence[str]) -> int:
    arguments = parser().parse_args(argv)
    address = server_address(arguments)
    options = {"model": arguments.model, **sampling_options(arguments)}
    on_terminal = sys.stdin.isatty()
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # bytes that are no text end neither the program nor the conversation
    with open_client(arguments, "maniple chat") as client:
        try:
            model = client.get_model(arguments.model)
        except ManipleError as error:
            return report("maniple chat", error, address)
        if not model.has_chat_template:
            print(f"{model.served_names[0]} has no chat template: use `maniple generate`", file=sys.stderr)
        if on_terminal:
            import readline  # noqa: F401  # line editing and history for input()

            print(f"Talking to {model.served_names[0]} on {address}. /help says what you can do.")
        conversation = Conversation(client, options, system=arguments.system, show_stats=arguments.stats)
        return _converse(conversation, address, on_terminal)


def _converse(conversation: Conversation, address: str, on_terminal: bool) -> int:
    code = OK
    while True:
        try:
            line = input("> " if on_terminal else "").strip()
        except EOFError:
            if on_terminal:
                print()
            return code
        except KeyboardInterrupt:
            if not on_terminal:
                raise
            print("\n(/quit or Ctrl-D leaves)")
            continue
        if line in ("/quit", "/exit"):
            return code
        if line == "/help":
            print(HELP)
        elif line == "/reset":
            conversation.reset()
            print("(forgotten)")
        elif line.startswith("/system"):
            conversation.reset(line.removeprefix("/system").strip() or None)
            print("(forgotten)")
        elif line.startswith("/"):
            print(f"There is no {line.split()[0]}; /help says what there is.")
        elif line:
            try:
                conversation.ask(line)
            except ManipleError as error:
                code = report("maniple chat", error, address)
                # A person may start the server again and go on; a script would only fail on every line that follows.
                if isinstance(error, TransportLost) and not on_terminal:
                    return code
