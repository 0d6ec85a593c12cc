"""What one rank's process is told at its start: flag over environment over default, all faults at once.

Everything about the model comes later, by calls.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from service_chassis.errors import ConfigurationError
from service_chassis.settings import (
    Fault,
    at_least,
    broken_rules,
    field_docstrings,
    one_of,
    read_number,
    read_optional_whole,
    read_settings,
    read_switch,
    read_text,
    read_whole,
    setting,
    settings_of,
)
from service_chassis.telemetry import LOG_FORMATS, LOG_LEVELS, LogFormat

_TOPIC = "worker"


def _address_rule(value: str) -> str:
    rule = "must be host:port or unix:/path"
    if value.startswith("unix:"):
        return "" if len(value) > len("unix:") else rule
    host, _, port = value.rpartition(":")
    return "" if host and port.isdecimal() and int(port) <= 65535 else rule


def _open_descriptor_rule(value: int | None) -> str:
    if value is None:
        return ""
    try:
        os.fstat(value)
    except (OSError, OverflowError):
        return "must be an open file descriptor"
    return ""


@dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    """The configuration of one rank."""

    listen: str = setting("127.0.0.1:50061", topic=_TOPIC, read=read_text, rule=_address_rule)
    """Where WorkerService answers: host:port, port 0 for any, or unix:/path."""
    health_listen: str = setting("127.0.0.1:50071", topic=_TOPIC, read=read_text, rule=_address_rule)
    """Where RankHealthService answers, on a server and threads of its own. Not the address of --listen."""
    rank: int = setting(0, topic=_TOPIC, read=read_whole, rule=at_least(0))
    """Place in the group. A Join that means another rank is refused."""
    world_size: int = setting(1, topic=_TOPIC, read=read_whole, rule=at_least(1))
    """Ranks of the group."""
    device: str = setting("auto", topic=_TOPIC, read=read_text, rule=one_of("auto", "cpu", "cuda"))
    """auto, cpu or cuda. auto is resolved when the model loads: a scripted model needs no torch to ask."""
    num_threads: int = setting(0, topic=_TOPIC, read=read_whole, rule=at_least(0, at_most=1024))
    """CPU threads of one forward; 0 is all cores. Ranks that share a machine should share its cores."""
    parent_fd: int | None = setting(None, topic=_TOPIC, read=read_optional_whole, rule=_open_descriptor_rule)
    """Read end of a pipe that closes when the parent dies; this process then ends at once. Unset: no parent."""
    report_interval_s: float = setting(0.1, topic=_TOPIC, read=read_number, rule=at_least(0.01, at_most=60))
    """Seconds between reports while a step is outstanding or long work is under way."""
    idle_report_interval_s: float = setting(1.0, topic=_TOPIC, read=read_number, rule=at_least(0.01, at_most=60))
    """Seconds between reports while idle."""
    hello_timeout_s: float = setting(10.0, topic=_TOPIC, read=read_number, rule=at_least(0.1, at_most=600))
    """Seconds that a new Steps stream may take to say Hello."""
    orphan_grace_s: float = setting(0.0, topic=_TOPIC, read=read_number, rule=at_least(0, at_most=86400))
    """Seconds of silence of the owner after which the rank exits; 0 is never. A rank never owned waits for ever."""
    allow_plaintext_snapshot: bool = setting(False, topic=_TOPIC, read=read_switch)
    """Send snapshots, which hold prompts and outputs, in plaintext over a network. Unix sockets, the loopback (a
    sidecar's mTLS too) and TLS need no permission."""
    max_step_message_bytes: int = setting(
        64 << 20, topic=_TOPIC, read=read_whole, rule=at_least(1 << 20, at_most=1 << 30)
    )
    """Largest message taken. Prompts over 1 MiB do not travel in deltas, so a delta stays far below."""
    allow_insecure_serialization: bool = setting(False, topic=_TOPIC, read=read_switch)
    """Run functions that the owner sends pickled (collective_rpc of a callable). Off: whoever reaches the port could
    run any code here."""
    log_level: str = setting("info", topic=_TOPIC, read=read_text, rule=one_of(*LOG_LEVELS))
    """debug, info, warning or error."""
    log_format: str = setting("auto", topic=_TOPIC, read=read_text, rule=one_of(*LOG_FORMATS))
    """auto, json or console; auto is colours on a terminal and JSON on a pipe."""

    def logging(self) -> tuple[str, LogFormat]:
        """Return what ``configure_logging`` takes."""
        return self.log_level, cast(LogFormat, self.log_format)


def read_config(arguments: Sequence[str], environment: Mapping[str, str]) -> WorkerConfig:
    """Return the configuration that flags and environment ask for.

    Raises:
        ConfigurationError: with every fault there is.
    """
    parser = argparse.ArgumentParser(prog="python -m worker_service", description="Serve one rank of a group.")
    docs = field_docstrings(WorkerConfig)
    for name, one in settings_of(WorkerConfig).items():
        # Everything is text here: argparse would stop at the first value that it cannot convert.
        text = docs[name].replace("%", "%%")
        if one.is_switch:
            parser.add_argument(one.flag, dest=name, nargs="?", const="true", help=text)
        else:
            parser.add_argument(one.flag, dest=name, help=text)
    known, unknown = parser.parse_known_args(list(arguments))
    flags = {name: text for name, text in vars(known).items() if text is not None}
    faults: list[Fault] = [(text, "", "is not a known flag") for text in unknown]
    values, unreadable = read_settings(WorkerConfig, flags, environment)
    config = WorkerConfig(**values)
    faults += unreadable + broken_rules(config)
    if config.rank >= config.world_size:
        faults.append(("rank", config.rank, f"must be below world_size, which is {config.world_size}"))
    if config.listen == config.health_listen and not config.listen.endswith(":0"):
        faults.append(("health_listen", config.health_listen, "must differ from listen"))
    if faults:
        raise ConfigurationError(faults)
    return config
