"""Reach a running server from a command: where it is, and what to say when a call fails."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from control_plane.cli.command_name import command_name
from control_plane.cli.number_flags import finite_at_least_0, number, whole
from control_plane.exit_codes import FAILURE, USAGE
from maniple_client import Client, Tls, token_in
from maniple_client.channel import DEFAULT_ADDRESS
from maniple_client.errors import DeadlineExceeded, ManipleError, TransportLost
from service_chassis.settings import above, at_least

SERVER_VARIABLE = "MANIPLE_SERVER"
# Files of a client. Not the variables of a server, which may run in the same environment.
_FILES = {
    "token_file": ("--token-file", "MANIPLE_CLIENT_TOKEN_FILE", "bearer token that says who calls"),
    "tls_ca": ("--tls-ca", "MANIPLE_CLIENT_TLS_CA", "authorities of the server, PEM; system: the system's"),
    "tls_certificate": ("--tls-certificate", "MANIPLE_CLIENT_TLS_CERTIFICATE", "certificate to show, PEM"),
    "tls_key": ("--tls-key", "MANIPLE_CLIENT_TLS_KEY", "its private key, PEM"),
}
_NAME_VARIABLE = "MANIPLE_CLIENT_TLS_SERVER_NAME"
# How long a command looks for a generation whose server is gone: somebody is watching.
RESUME_FOR_S = 5.0
# OpenSSL's words for an answer that is no TLS, and for a certificate of somebody unknown.
_SPEAKS_NO_TLS, _UNKNOWN_AUTHORITY = "WRONG_VERSION_NUMBER", "CERTIFICATE_VERIFY_FAILED"


def add_server_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--server",
        metavar="ADDRESS",
        help="HOST:PORT or unix:PATH of the server; several, with commas between, where one goes on when another dies "
        f"(default {DEFAULT_ADDRESS}) [{SERVER_VARIABLE}]",
    )

    group = parser.add_argument_group("security")
    for flag, variable, what in _FILES.values():
        group.add_argument(flag, metavar="FILE", help=f"{what} [{variable}]")
    group.add_argument(
        "--tls-server-name",
        metavar="NAME",
        help=f"what the server's certificate must be for, if not for the host of --server [{_NAME_VARIABLE}]",
    )


def open_client(arguments: argparse.Namespace, command: str, environ: Mapping[str, str] = os.environ) -> Client:
    """Return a client of the server that the flags name.

    Raises:
        SystemExit: a file cannot be read, an address is for a browser, or a token would travel in plaintext; said on
            standard error.
    """
    given = {name: getattr(arguments, name) or environ.get(variable, "") for name, (_, variable, _) in _FILES.items()}
    server_name = arguments.tls_server_name or environ.get(_NAME_VARIABLE, "")
    tls = None
    try:
        if given["tls_ca"] or given["tls_certificate"] or given["tls_key"] or server_name:
            ca = "" if given["tls_ca"] == "system" else given["tls_ca"]
            _check_kinds(given | {"tls_ca": ca})
            tls = Tls(ca=ca, certificate=given["tls_certificate"], key=given["tls_key"], server_name=server_name)
        token = token_in(given["token_file"]) if given["token_file"] else None
        if token is not None:
            token()
        addresses = server_address(arguments, environ).split(",")
        for address in addresses:
            if address.startswith(("http://", "https://")):
                raise ValueError(f"--server {address}: must be HOST:PORT or unix:PATH: the protocol is gRPC, not HTTP")
        return Client(addresses, tls=tls, token=token, resume_for_s=RESUME_FOR_S)
    except OSError as error:
        flag = next((_FILES[name][0] for name, path in given.items() if path == error.filename), "")
        print(f"{command}: {flag} {error.filename}: cannot be read: {error.strerror}", file=sys.stderr)
        raise SystemExit(USAGE) from None
    except ValueError as error:
        print(f"{command}: {error}", file=sys.stderr)
        raise SystemExit(USAGE) from None


def _check_kinds(given: Mapping[str, str]) -> None:
    """Refuse a file that is something else than its flag says: gRPC would speak of its insides."""
    for name, kind in (("tls_ca", "CERTIFICATE"), ("tls_certificate", "CERTIFICATE"), ("tls_key", "PRIVATE KEY")):
        if given[name] and f"{kind}-----".encode() not in Path(given[name]).read_bytes():
            raise ValueError(f"{_FILES[name][0]} {given[name]}: holds no {kind.lower()} in PEM")


def server_address(arguments: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> str:
    """Resolve flag > environment > default."""
    return str(arguments.server or environ.get(SERVER_VARIABLE) or DEFAULT_ADDRESS)


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say how to sample; what is left out is the server's choice."""
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--max-tokens",
        type=whole(1),
        metavar="N",
        help="end after N tokens (default: the model's own, else the context)",
    )
    group.add_argument("--min-tokens", type=whole(0), metavar="N", help="no stop takes effect before N tokens")
    group.add_argument(
        "--temperature",
        type=number(finite_at_least_0),
        metavar="T",
        help="0: always the likeliest token (default: the model's own)",
    )
    group.add_argument(
        "--top-p",
        type=number(above(0, at_most=1)),
        metavar="P",
        help="sample among the likeliest tokens that make up P (default: the model's own)",
    )
    group.add_argument(
        "--top-k",
        type=whole(-1, at_most=2**31 - 1),
        metavar="K",
        help="sample among the K likeliest tokens (default: the model's own)",
    )
    group.add_argument(
        "--min-p",
        type=number(at_least(0, at_most=1)),
        metavar="P",
        help="drop tokens less likely than P times the likeliest (default: the model's own)",
    )
    group.add_argument(
        "--seed", type=whole(0, at_most=2**64 - 1), metavar="S", help="the same seed gives the same noise"
    )
    group.add_argument("--stop", action="append", metavar="TEXT", help="end before TEXT appears; may be repeated")
    group.add_argument("--ignore-eos", action="store_true", default=None, help="go on past the end of text")


SAMPLING_FLAGS = (
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "ignore_eos",
)


def sampling_options(arguments: argparse.Namespace) -> dict[str, object]:
    """Return the sampling flags that were given, as ``Client.generate`` takes them."""
    return {name: getattr(arguments, name) for name in SAMPLING_FLAGS if getattr(arguments, name) is not None}


def report(command: str, error: ManipleError, address: str) -> int:
    """Say why a call failed and what may help; return the exit code."""
    is_late = isinstance(error, DeadlineExceeded) and not error.reason  # gRPC's own words for it differ
    print(f"{command}: {'the deadline passed' if is_late else error.message}", file=sys.stderr)
    if isinstance(error, TransportLost):
        print(
            f"Is a server running on {address}? `{command_name()} serve` starts one. {_way(address, error.message)}",
            file=sys.stderr,
        )
    elif error.retry_after_s is not None:
        print(f"Try again in {error.retry_after_s:g} s.", file=sys.stderr)
    elif error.incident_id:
        print(f"The server's log has the details under incident {error.incident_id}.", file=sys.stderr)
    return FAILURE


def _way(address: str, message: str) -> str:
    """Return what may be wrong with how a server was asked that was not reached."""
    if _SPEAKS_NO_TLS in message:
        return "It speaks no TLS: leave out --tls-ca and what else is for TLS."
    if _UNKNOWN_AUTHORITY in message:
        return "No authority of --tls-ca signed its certificate."
    if any(":" not in one for one in address.split(",")):
        return "Without a port it is 443."
    return "One with TLS needs --tls-ca, and --tls-certificate if it asks who calls."
