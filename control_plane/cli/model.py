"""``maniple model``: fetch models ahead of time, and see what is in the cache."""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from control_plane.announcement import StageProgress
from control_plane.cli.announcements import display
from control_plane.cli.command_name import command_name
from control_plane.config import model_faults
from control_plane.exit_codes import FAILURE, OK, USAGE
from service_chassis.command_parser import CommandParser
from service_chassis.errors import ConfigurationError, ManipleError
from service_chassis.ids import Rank


def parser() -> argparse.ArgumentParser:
    made = CommandParser(
        prog="maniple model",
        description="Fetch models ahead of time, and see what is in the cache (~/.cache/maniple, or MANIPLE_CACHE).",
        epilog="Examples:\n  maniple model fetch demo\n  maniple model fetch HuggingFaceTB/SmolLM2-135M-Instruct\n"
        "  maniple model fetch ./my-model.gguf      converts it once\n  maniple model list",
    )
    verbs = made.add_subparsers(dest="verb", required=True, metavar="{fetch,list}")
    fetch = verbs.add_parser(
        "fetch",
        help="fetch a model, and convert it where that is needed",
        description="Fetch a model into the cache, and convert it where that is needed, so that a server starts with "
        "it at once. What is there already is kept.",
        epilog="Examples:\n  maniple model fetch demo\n  maniple model fetch HuggingFaceTB/SmolLM2-135M-Instruct\n"
        "  maniple model fetch ./my-model.gguf\n  MANIPLE_CACHE=/models maniple model fetch demo\n"
        "  maniple model fetch Qwen/Qwen3-8B --to /models/qwen3-8b --revision main",
    )
    fetch.add_argument("model", metavar="NAME", help="demo, a hub id, or a .gguf file")
    fetch.add_argument(
        "--keep-blocks",
        action="store_true",
        help="keep the weights of demo or a .gguf file in 8 and 4 bits, as a server with --quantization takes them",
    )
    fetch.add_argument(
        "--to",
        metavar="DIRECTORY",
        type=Path,
        help="keep it there instead of in the cache, under a path that workers on other machines can be told",
    )
    fetch.add_argument(
        "--revision",
        metavar="NAME",
        default="",
        help="branch, tag or commit on the hub (default: main); with --to, where it replaces another revision. A "
        "branch that moved has no other name, and is not fetched again",
    )
    verbs.add_parser(
        "list",
        help="list the models in the cache",
        description="List the models in the cache: name, size, directory.",
        epilog="Examples:\n  maniple model list\n  MANIPLE_CACHE=/models maniple model list",
    )
    return made


def run(argv: Sequence[str]) -> int:
    arguments = parser().parse_args(argv)
    if arguments.verb == "list":
        return _list()
    if arguments.revision and arguments.to is None:
        print("maniple model fetch: --revision needs --to: the cache has one revision of a model", file=sys.stderr)
        return USAGE
    if arguments.keep_blocks and arguments.model != "demo" and not arguments.model.endswith(".gguf"):
        print("maniple model fetch: --keep-blocks is for demo and .gguf files: others have no blocks", file=sys.stderr)
        return USAGE
    return _fetch(arguments.model, arguments.to, arguments.revision, keep_blocks=arguments.keep_blocks)


def _fetch(model: str, to: Path | None, revision: str, *, keep_blocks: bool) -> int:
    faults = model_faults(model)
    if faults:
        print(f"maniple model fetch: {model}: {faults[0][2]}", file=sys.stderr)
        return USAGE
    from control_plane.model_store import place_model, resolve_model

    lock = threading.Lock()  # the hub reports from several threads
    with display() as show:

        def progress(what: str, share: float, detail: str) -> None:
            with lock:
                show(StageProgress(what, Rank(0), share, detail))

        try:
            if to is None:
                place = resolve_model(model, progress, keep_blocks=keep_blocks)
                where, start = f"{place.name} is in {place.path}", model
            else:
                is_new = place_model(
                    model, to.expanduser().absolute(), progress, revision=revision, keep_blocks=keep_blocks
                )
                where = f"{model} is in {to}" if is_new else f"{to} holds a model already, which is kept"
                start = str(to)
        except ConfigurationError as error:
            reason = "; ".join(
                rule if field == "model" else f"--{field} {value} {rule}" for field, value, rule in error.faults
            )
        except ManipleError as error:
            reason = error.message
        else:
            reason = ""
    if reason:
        print(f"maniple model fetch: {model}: {reason}", file=sys.stderr)
        return FAILURE
    flags = " --quantization q4" if keep_blocks else ""
    print(f"{where}. Now type: {command_name()} serve --model {start}{flags}")
    return OK


def _list() -> int:
    from control_plane.model_store import list_models

    models = list_models()
    if not models:
        print(f"The cache is empty. `{command_name()} model fetch demo` fetches a small chat model.")
        return OK
    width = max(len(model.name) for model in models)
    for model in models:
        print(f"{model.name:<{width}}  {model.num_bytes / 2**20:8.1f} MiB  {model.path}")
    return OK
