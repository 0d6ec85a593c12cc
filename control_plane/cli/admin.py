"""``maniple admin``: the verbs of an operator, against a running server."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from control_plane.cli.connection import add_server_flag, open_client, report, server_address
from control_plane.cli.number_flags import LONGEST_S, number, whole
from control_plane.exit_codes import INTERRUPTED, OK
from maniple.v1 import admin_pb2
from maniple_client import Client, ManipleError
from service_chassis.command_parser import CommandParser
from service_chassis.settings import at_least
from service_chassis.sleep_tags import DEEPEST_SLEEP, SLEEP_TAGS

_MODES = ("abort", "wait", "keep")
_MIB = 1 << 20
_MODE_HELP = (
    "what happens to requests that are here: they end with finish reason abort (abort), finish (wait), or freeze until "
    "generation is resumed (keep, in which new requests queue; else they are refused). Default abort"
)


def _pause(client: Client, arguments: argparse.Namespace) -> None:
    client.admin.pause(arguments.mode, clear_cache=arguments.clear_cache)
    print(f"Paused.{_left(client)}")


def _resume(client: Client, arguments: argparse.Namespace) -> None:
    client.admin.resume()
    print("Generation goes on.")


def _sleep(client: Client, arguments: argparse.Namespace) -> None:
    answer = client.admin.sleep(arguments.level, arguments.mode)
    print(f"Asleep: {', '.join(client.admin.sleeping_tags())}.{_left(client)}")
    _print_memory(answer.ranks)


def _wake_up(client: Client, arguments: argparse.Namespace) -> None:
    answer = client.admin.wake_up(arguments.tags)
    asleep = client.admin.sleeping_tags()
    print(f"Still asleep: {', '.join(asleep)}." if asleep else "Awake.")
    _print_memory(answer.ranks)


def _print_memory(ranks: Iterable[admin_pb2.RankMemory]) -> None:
    for one in ranks:
        gave = f"gave back {one.freed_bytes / _MIB:.0f} MiB and " if one.freed_bytes else ""
        print(f"Group {one.group}, rank {one.rank}: {gave}takes {one.taken_bytes / _MIB:.0f} MiB.")


def _update_weights(client: Client, arguments: argparse.Namespace) -> None:
    num_tensors = client.admin.update_weights(arguments.path)
    print(f"{num_tensors} tensors were replaced on every rank.")


def _reset_prefix_cache(client: Client, arguments: argparse.Namespace) -> None:
    answer = client.admin.reset_prefix_cache()
    held = f"; {answer.num_blocks_in_use} are held by requests and stay" if answer.num_blocks_in_use else ""
    print(f"{answer.num_blocks} cached blocks were forgotten{held}.")


def _drain(client: Client, arguments: argparse.Namespace) -> None:
    num_aborted = 0
    for progress in client.admin.drain(arguments.deadline_s or 0.0):
        num_aborted = progress.num_aborted
        if progress.num_running or progress.num_waiting:
            print(f"{progress.num_running} running, {progress.num_waiting} waiting", flush=True)
    aborted = f", {num_aborted} requests were aborted" if num_aborted else ""
    print(f"Drained{aborted}. The server stays up, and accepts no more requests.")


def _start_profile(client: Client, arguments: argparse.Namespace) -> None:
    client.admin.start_profile(arguments.num_steps)
    until = f"for {arguments.num_steps} steps" if arguments.num_steps else "until `maniple admin stop-profile`"
    print(f"The control plane is profiled {until}.")


def _stop_profile(client: Client, arguments: argparse.Namespace) -> None:
    print(f"The profile is in {client.admin.stop_profile()} on the server's machine.")


def _left(client: Client) -> str:
    status = client.status()
    num_kept = sum(group.num_running + group.num_waiting for group in status.groups)
    return f" {num_kept} samples are kept." if num_kept else ""


_VERBS: dict[str, tuple[Callable[[Client, argparse.Namespace], None], str, str, str]] = {
    "pause": (
        _pause,
        "stop scheduling; returns when nothing is computed any more",
        "Stop scheduling, and return when nothing is computed any more. Requests can be cancelled meanwhile, and "
        "their deadlines pass. A pause is this server's alone: a control plane that takes its workers over goes on.",
        "maniple admin pause --mode keep\n  maniple admin pause --mode wait --clear-cache",
    ),
    "resume": (_resume, "schedule again", "Schedule again, with what was kept first.", "maniple admin resume"),
    "sleep": (
        _sleep,
        "stop scheduling, and give memory back",
        "Sleep. Level 0 stops scheduling, as `pause` does. Level 1 also gives memory back: the weights are kept on the "
        "host, on a CPU on disk, and what the KV cache held is lost. Level 2 keeps no weights: they are read again "
        "when they wake, or come by update-weights. Both need --enable-sleep-mode where workers were started.",
        "maniple admin sleep --level 1 --mode keep\n  maniple admin sleep --level 2",
    ),
    "wake-up": (
        _wake_up,
        "end a sleep",
        "Wake up what sleeps: all, or what is named. Requests are computed again once nothing sleeps.",
        "maniple admin wake-up\n  maniple admin wake-up weights",
    ),
    "update-weights": (
        _update_weights,
        "replace the weights by those of another checkpoint of the model",
        "Replace the weights in all groups, or in none where the checkpoint does not fit. PATH is a model directory on "
        "the workers. Requests wait meanwhile, and are then computed anew with the new weights.",
        "maniple admin update-weights /models/step-200",
    ),
    "reset-prefix-cache": (
        _reset_prefix_cache,
        "forget cached prefixes",
        "Forget all cached prefixes. Blocks that running requests hold stay, and are cached when those end: pause "
        "with mode abort or wait first if nothing of before may be used again.",
        "maniple admin reset-prefix-cache",
    ),
    "drain": (
        _drain,
        "finish what is here, accept no more, and tell how many are left",
        "Accept no more requests, and wait until none is left. It goes on when this command is ended.",
        "maniple admin drain\n  maniple admin drain --deadline-s 60",
    ),
    "start-profile": (
        _start_profile,
        "profile the control plane",
        "Profile the process of the control plane with cProfile: doors, scheduler, deltas, text; no worker. It costs "
        "about as much again as what it measures.",
        "maniple admin start-profile\n  maniple admin start-profile --num-steps 200",
    ),
    "stop-profile": (
        _stop_profile,
        "end the profile, and say where it is",
        "End the profile and write it, for `python -m pstats FILE`. One that ended by its number of steps is told too.",
        "maniple admin stop-profile",
    ),
}

# What a verb takes besides flags.
_WORDS = {"wake-up": " [TAG ...]", "update-weights": " PATH"}


def parser() -> argparse.ArgumentParser:
    made = CommandParser(
        prog="maniple admin",
        usage="maniple admin VERB [FLAGS]",
        description="Operate a running server.",
        epilog="Exit code 0: done; 1: the server refused, or nobody answers.\n\n"
        "Examples:\n  maniple admin pause --mode keep\n  maniple admin resume\n  maniple admin drain --deadline-s 60",
    )
    verbs = made.add_subparsers(dest="verb", required=True, metavar="VERB", prog="maniple admin")
    for name, (_, summary, description, examples) in _VERBS.items():
        verb = verbs.add_parser(
            name,
            usage=f"maniple admin {name} [FLAGS]{_WORDS.get(name, '')}",
            help=summary,
            description=description,
            epilog=f"Examples:\n  {examples}",
        )
        add_server_flag(verb)
        _add_flags(name, verb.add_argument)
    return made


def _tag(text: str) -> str:
    # What argparse says of choices names an empty one, where all of them may be left out.
    if text not in SLEEP_TAGS:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(SLEEP_TAGS)}")
    return text


def _add_flags(verb: str, add: Callable[..., Any]) -> None:
    if verb in ("pause", "sleep"):
        add("--mode", choices=_MODES, default="abort", help=_MODE_HELP)
    if verb == "pause":
        add("--clear-cache", action="store_true", help="forget cached prefixes too")
    if verb == "sleep":
        add("--level", type=whole(0, at_most=DEEPEST_SLEEP), default=0, metavar="N", help="0 (the default), 1 or 2")
    if verb == "wake-up":
        add("tags", nargs="*", metavar="TAG", type=_tag, help=f"of {', '.join(SLEEP_TAGS)}; none: all")
    if verb == "update-weights":
        add("path", metavar="PATH", help="a directory with config.json and safetensors, where the workers run")
    if verb == "start-profile":
        add("--num-steps", type=whole(0, at_most=2**32 - 1), default=0, metavar="N", help="end it by itself after N")
    if verb == "drain":
        add(
            "--deadline-s",
            type=number(at_least(0.001, at_most=LONGEST_S)),
            metavar="SECONDS",
            help="abort what is left after so long (default: never)",
        )


def run(argv: Sequence[str]) -> int:
    arguments = parser().parse_args(argv)
    address = server_address(arguments)
    with open_client(arguments, "maniple admin") as client:
        try:
            _VERBS[arguments.verb][0](client, arguments)
        except ManipleError as error:
            return report(f"maniple admin {arguments.verb}", error, address)
        except KeyboardInterrupt:
            print("The server goes on with it.", file=sys.stderr)
            return INTERRUPTED
    return OK
