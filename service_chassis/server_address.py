"""Tell addresses to listen on from those to connect to."""

from __future__ import annotations

import ipaddress

LOOPBACK = "127.0.0.1"


def is_wildcard(address: str) -> bool:
    """Whether HOST:PORT means every interface, so that nobody can connect to it as it is written."""
    host, _, _ = address.rpartition(":")
    if address.startswith("unix:"):
        return False
    try:
        return ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return False


def local_target(address: str) -> str:
    """Return where a client on this machine reaches a server that listens on ``address``."""
    return f"{LOOPBACK}:{address.rpartition(':')[2]}" if is_wildcard(address) else address


def is_private(address: str) -> bool:
    """Whether only this machine can reach ``address``: a Unix socket, or the loopback. No name is looked up."""
    if address.startswith("unix:"):
        return True
    host = address.removeprefix("dns:///").rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
