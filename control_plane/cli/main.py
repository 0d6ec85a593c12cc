"""The ``maniple`` command. Only the chosen command's module is imported, so that help appears at once."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import NamedTuple

from control_plane.exit_codes import INTERRUPTED, OK, USAGE


class Command(NamedTuple):
    module: str
    summary: str


GROUPS: dict[str, dict[str, Command]] = {
    "Serve": {
        "serve": Command("serve", "serve a model: control plane and workers on this machine"),
        "control-plane": Command("control_plane", "serve with workers that run elsewhere"),
        "worker": Command("worker", "run the workers of this machine, for a control plane elsewhere"),
    },
    "Ask": {
        "generate": Command("generate", "continue a text and stream the answer"),
        "chat": Command("chat", "talk to the model"),
    },
    "Look": {
        "status": Command("status", "say what a server is doing; --watch to see it live"),
        "replay": Command("replay", "check a log that `serve --record-deltas` wrote"),
    },
    "Operate": {
        "admin pause": Command("admin", "stop scheduling: abort, finish or freeze what is here"),
        "admin resume": Command("admin", "schedule again"),
        "admin sleep": Command("admin", "stop scheduling, and give memory back"),
        "admin wake-up": Command("admin", "end a sleep"),
        "admin update-weights": Command("admin", "replace the weights by those of another checkpoint"),
        "admin reset-prefix-cache": Command("admin", "forget cached prefixes"),
        "admin drain": Command("admin", "finish what is here, accept no more"),
        "admin start-profile": Command("admin", "profile the control plane"),
        "admin stop-profile": Command("admin", "end the profile, and say where it is"),
    },
    "Models": {
        "model fetch": Command("model", "fetch a model into the cache"),
        "model list": Command("model", "list what is in the cache"),
    },
}
# Used by `make demo`; of no use to anybody else.
HIDDEN = {"demo": Command("demo", "serve the demo model, ask one question, stop")}

EXAMPLES = """\
Examples:
  maniple serve                                  the demo model on 127.0.0.1:50051
  maniple serve --model ./my-model --max-num-seqs 128
  maniple chat
  maniple generate "Once upon a time" --max-tokens 64 --temperature 0.7
  maniple status --watch

Exit codes:
  0 done   1 failed   2 bad flags or configuration   3 the server lost its workers for good   130 Ctrl-C"""


def usage() -> str:
    """Return the help of ``maniple`` itself."""
    lines = ["Usage: maniple COMMAND [FLAGS]", "", "Serve large language models over gRPC.", ""]
    for group, commands in GROUPS.items():
        lines.append(f"{group}:")
        width = max(16, *(len(name) + 2 for name in commands))
        lines += [f"  {name:<{width}}{command.summary}" for name, command in commands.items()]
        lines.append("")
    lines += [EXAMPLES, "", "`maniple COMMAND --help` says more about each, `maniple --version` which this is."]
    return "\n".join(lines)


def commands() -> dict[str, Command]:
    """Return every command by its first word."""
    found = {name.split()[0]: command for group in GROUPS.values() for name, command in group.items()}
    return found | HIDDEN


def version() -> str:
    from importlib.metadata import version as version_of

    return version_of("maniple")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the process's exit code."""
    # gRPC's C core tells of every closed connection on standard error otherwise, also of those that we closed.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    try:
        try:
            code = _run(list(sys.argv[1:] if argv is None else argv))
        except SystemExit as error:  # argparse: 0 after --help, 2 for bad usage
            code = error.code if isinstance(error.code, int) else USAGE
        sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader (head, less) has seen enough. Point stdout elsewhere, or the flush at exit fails again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    return code


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage())
        return OK if words else USAGE
    if words[0] in ("-V", "--version"):
        print(f"maniple {version()}")
        return OK
    command = commands().get(words[0])
    if command is None:
        print(f"maniple: there is no command {words[0]!r}; `maniple --help` lists them", file=sys.stderr)
        return USAGE
    module = importlib.import_module(f"control_plane.cli.{command.module}")
    code: int = module.run(words[1:])
    return code


if __name__ == "__main__":
    sys.exit(main())
