"""What one rank's process is told at its start: flag over environment over default, all faults at once.

Everything about the model comes later, by calls.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, cast

from service_chassis import metrics_server
from service_chassis.command_parser import CommandParser
from service_chassis.device_ids import KINDS, device_ids_rule, ids_fit_rule
from service_chassis.errors import ConfigurationError
from service_chassis.flags import add_flags, flag_texts, flag_words
from service_chassis.kernel_rules import kernel_faults
from service_chassis.protocol.broadcast_ring import ReaderFds
from service_chassis.server_address import is_private
from service_chassis.settings import (
    Fault,
    at_least,
    broken_rules,
    one_of,
    read_number,
    read_optional_whole,
    read_settings,
    read_switch,
    read_text,
    read_whole,
    read_wholes,
    read_words,
    setting,
    settings_of,
)
from service_chassis.telemetry import LOG_FORMATS, LOG_LEVELS, LogFormat
from service_chassis.tls import TlsFiles

_ADDRESSES, _RANKS, _DEVICE, _OWNER, _LOGGING = "addresses", "ranks", "device", "owner", "logging"
_SECURITY = "security"
# The configuration's names of the places in TlsFiles.
TLS_FIELDS = {"certificate": "tls_certificate", "key": "tls_key", "ca": "tls_client_ca"}
_MOST_RANKS = 1024
_LAST_PORT = 65535


def _address_rule(value: str) -> str:
    rule = "must be HOST:PORT or unix:PATH"
    if value.startswith("unix:"):
        return "" if len(value) > len("unix:") else rule
    host, _, port = value.rpartition(":")
    return "" if host and port.isdecimal() and len(port) <= 5 and int(port) <= _LAST_PORT else rule


def _open_descriptor_rule(value: int | None) -> str:
    if value is None:
        return ""
    try:
        os.fstat(value)
    except (OSError, OverflowError):
        return "must be an open file descriptor"
    return ""


def _ring_rule(value: str) -> str:
    if not value:
        return ""
    try:
        fds = ReaderFds.parse(value)
    except (TypeError, ValueError):
        return "must be three descriptors, parted by commas"
    return next(filter(None, map(_open_descriptor_rule, fds)), "")


@dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    """The configuration of one rank."""

    # Not those of a control plane: MANIPLE_LISTEN in a pod's environment must not move its workers.
    environment_prefix: ClassVar[str] = "MANIPLE_WORKER_"

    listen: str = setting("127.0.0.1:50061", topic=_ADDRESSES, read=read_text, rule=_address_rule, metavar="ADDRESS")
    """Where WorkerService answers: HOST:PORT, port 0 for any, or unix:PATH."""
    health_listen: str = setting(
        "", topic=_ADDRESSES, read=read_text, rule=lambda v: _address_rule(v) if v else "", metavar="ADDRESS"
    )
    """Where RankHealthService answers, on a server and threads of its own. Default: the host of --listen, its port plus
    the number of ranks here; a Unix socket's path with -health behind it."""
    probe_listen: str = setting(
        "", topic=_ADDRESSES, read=read_text, rule=lambda v: _address_rule(v) if v else "", metavar="ADDRESS"
    )
    """Where grpc.health.v1 answers in plaintext, for probes that speak no TLS: SERVING or not, and nothing else.
    Each rank here has the next port. Default: nowhere."""
    metrics_listen: str = setting(
        "", topic=_ADDRESSES, read=read_text, rule=metrics_server.metrics_address_rule, metavar="ADDRESS"
    )
    """Where Prometheus finds metrics, HOST:PORT, over HTTP in plaintext and for whoever connects. Each rank here has
    the next port. Needs the extra `observability`. Default: nowhere."""
    tls_certificate: str = setting("", topic=_SECURITY, read=read_text, metavar="FILE")
    """This worker's certificate with its chain, PEM. With it both servers speak TLS only; a file that is replaced is
    taken for new connections, without ending those that are open."""
    tls_key: str = setting("", topic=_SECURITY, read=read_text, metavar="FILE")
    """The certificate's private key, PEM, unencrypted."""
    tls_client_ca: str = setting("", topic=_SECURITY, read=read_text, metavar="FILE")
    """Authorities, PEM, one of which must have signed the certificate of whoever connects."""
    tls_client_names: tuple[str, ...] = setting((), topic=_SECURITY, read=read_words, metavar="NAMES")
    """Names, by commas, of which one must be in the certificate of whoever connects, as a DNS name, URI or common name.
    Default: every certificate of --tls-client-ca commands this worker, so that authority must sign nobody else."""
    allow_plaintext_listen: bool = setting(False, topic=_SECURITY, read=read_switch)
    """Listen in plaintext and without authentication where others can connect. Only on a network that encrypts and
    admits nobody else: whoever reaches the port sees prompts and commands the worker."""
    rank: int = setting(0, topic=_RANKS, read=read_whole, rule=at_least(0, at_most=_MOST_RANKS - 1))
    """Place in the group; under a supervisor of several ranks, of its first. A Join that means another is refused."""

    node_rank: int = setting(
        0, topic=_RANKS, read=read_whole, rule=at_least(0, at_most=_MOST_RANKS - 1), metavar="INDEX"
    )
    """Which machine of the group this is, where each has as many ranks; --rank is then this times
    --tensor-parallel-size."""
    world_size: int = setting(1, topic=_RANKS, read=read_whole, rule=at_least(1, at_most=_MOST_RANKS), metavar="RANKS")
    """Ranks of the group. Not given: as many as run here."""
    tensor_parallel_size: int = setting(
        1, topic=_RANKS, read=read_whole, rule=at_least(1, at_most=_MOST_RANKS), metavar="RANKS"
    )
    """Ranks to run here, each in a process of its own on the next port, of which all end when one does. 1: this process
    is the rank."""
    device: str = setting("auto", topic=_DEVICE, read=read_text, rule=one_of("auto", *KINDS))
    """auto, cpu or cuda; rocm and xpu are known and refused with what is missing. auto is what torch was built for, and
    resolved when the model loads: a scripted model needs no torch to ask."""
    device_ids: tuple[int, ...] = setting((), topic=_DEVICE, read=read_wholes, rule=device_ids_rule, metavar="INDICES")
    """Devices of the ranks here, by commas, in the order of the ranks; as CUDA counts those that CUDA_VISIBLE_DEVICES
    leaves, from 0. Default: --first-device and the next ones."""
    first_device: int = setting(
        0, topic=_DEVICE, read=read_whole, rule=at_least(0, at_most=_MOST_RANKS - 1), metavar="INDEX"
    )
    """Index of the device of rank 0; other ranks have the next ones. Groups on one machine begin at different ones."""
    num_threads: int = setting(0, topic=_DEVICE, read=read_whole, rule=at_least(0, at_most=1024), metavar="THREADS")
    """CPU threads of one forward; 0 is all cores, shared with the ranks of the group that may use the same ones."""
    num_groups_sharing: int = setting(
        1, topic=_DEVICE, read=read_whole, rule=at_least(1, at_most=_MOST_RANKS), metavar="GROUPS"
    )
    """Groups that share this machine's cores and memory, this one included. On a CPU each takes its part of them: of
    the threads where --num-threads is 0, of the memory for KV blocks where no size is asked for."""
    attention_backend: str = setting("auto", topic=_DEVICE, read=read_text, metavar="NAME")
    """What computes attention: cpu, triton, flashinfer (with the extra of that name), torch (plain, slow), or what a
    package offers under the group of entry points maniple.attention_backends. auto is triton on a GPU and cpu
    elsewhere."""
    torch_compile: bool = setting(False, topic=_DEVICE, read=read_switch)
    """Have torch compile the layers on a GPU, for graphs and for steps without. What was compiled is kept in
    MANIPLE_CACHE over restarts; on one rank, for models of our own."""
    tune_kernels: bool = setting(False, topic=_DEVICE, read=read_switch)
    """Measure at the first start on a kind of GPU which tiles and warps suit its attention kernels best, minutes once;
    what was found is kept in MANIPLE_CACHE. Off: the table in the source."""
    enable_sleep_mode: bool = setting(False, topic=_DEVICE, read=read_switch)
    """Be ready to give the memory of weights and KV cache back (AdminService.Sleep, levels 1 and 2). On a CUDA device
    it needs the extra `sleep`."""
    sleep_backend: str = setting(
        "auto", topic=_DEVICE, read=read_text, rule=lambda v: "" if v else "must not be empty", metavar="NAME"
    )
    """What gives memory back: pages (CPU), torch-memory-saver (CUDA), or what a package offers under the group of entry
    points maniple.sleep_backends. auto is the one for the device."""
    sleep_directory: str = setting("", topic=_DEVICE, read=read_text, metavar="DIRECTORY")
    """Where a worker on a CPU keeps the weights while it sleeps at level 1, in a file without a name that goes with the
    process. It needs room for them, and should be on a disk: on a tmpfs they stay in memory. Default: where the system
    has its temporary files."""
    parent_fd: int | None = setting(
        None, topic=_OWNER, read=read_optional_whole, rule=_open_descriptor_rule, is_internal=True
    )
    """Read end of a pipe that closes when the parent dies; this process then ends at once. Unset: no parent."""
    port_offset: int = setting(0, topic=_OWNER, read=read_whole, rule=at_least(0, at_most=_LAST_PORT), is_internal=True)
    """Place of this rank among those that its parent starts with one environment: its ports for probes and metrics are
    so many behind those that are named there."""
    is_all_here: bool = setting(False, topic=_OWNER, read=read_switch, is_internal=True)
    """Every rank of the group runs beside this one, under the same supervisor: they meet on the loopback, which no mesh
    and no network policy has a say in."""
    delta_ring_fds: str = setting("", topic=_OWNER, read=read_text, rule=_ring_rule, is_internal=True)
    """The parent's ring in shared memory, through which deltas come: three descriptors, as it passed them on. Empty:
    deltas come on Steps."""
    report_interval_s: float = setting(
        0.1, topic=_OWNER, read=read_number, rule=at_least(0.01, at_most=60), metavar="SECONDS"
    )
    """Seconds between reports while a step is outstanding or long work is under way."""
    idle_report_interval_s: float = setting(
        1.0, topic=_OWNER, read=read_number, rule=at_least(0.01, at_most=60), metavar="SECONDS"
    )
    """Seconds between reports while idle."""
    hello_timeout_s: float = setting(
        10.0, topic=_OWNER, read=read_number, rule=at_least(0.1, at_most=600), metavar="SECONDS"
    )
    """Seconds that a new Steps stream may take to say Hello."""
    announce_fd: int | None = setting(
        None, topic=_OWNER, read=read_optional_whole, rule=_open_descriptor_rule, is_internal=True
    )
    """Write end of a pipe that gets a line of JSON, {"address", "health_address", "pid"}, once both servers listen."""
    orphan_grace_s: float = setting(
        60.0, topic=_OWNER, read=read_number, rule=at_least(0, at_most=86400), metavar="SECONDS"
    )
    """Seconds of silence of the owner after which the rank exits; 0 is never. A rank never owned waits for ever."""
    allow_plaintext_snapshot: bool = setting(False, topic=_OWNER, read=read_switch)
    """Send snapshots, which hold prompts and outputs, in plaintext over a network. Unix sockets, the loopback (a
    sidecar's mTLS too) and TLS need no permission."""
    max_step_message_bytes: int = setting(
        64 << 20, topic=_ADDRESSES, read=read_whole, rule=at_least(1 << 20, at_most=1 << 30), metavar="BYTES"
    )
    """Largest message taken. Prompts over 1 MiB do not travel in deltas, so a delta stays far below."""
    allow_insecure_serialization: bool = setting(False, topic=_OWNER, read=read_switch)
    """Run functions that the owner sends pickled (collective_rpc of a callable). Off: whoever reaches the port could
    run any code here."""
    log_level: str = setting("info", topic=_LOGGING, read=read_text, rule=one_of(*LOG_LEVELS))
    """debug, info, warning or error."""
    log_format: str = setting("auto", topic=_LOGGING, read=read_text, rule=one_of(*LOG_FORMATS))
    """auto, json or console; auto is colours on a terminal and JSON on a pipe."""

    @property
    def tls_files(self) -> TlsFiles:
        """Of both servers."""
        return TlsFiles(certificate=self.tls_certificate, key=self.tls_key, ca=self.tls_client_ca)

    def logging(self) -> tuple[str, LogFormat]:
        """Return what ``configure_logging`` takes."""
        return self.log_level, cast(LogFormat, self.log_format)


_EPILOG = """\
Every flag has an environment variable, named in brackets; a flag wins over it. Under torchrun rank and world size come
from it.

Examples:
  maniple worker
  maniple worker --tensor-parallel-size 2 --listen 0.0.0.0:50061 \\
      --tls-certificate worker.crt --tls-key worker.key --tls-client-ca ca.crt
  maniple worker --listen 10.0.0.2:50061 --tensor-parallel-size 4 --rank 4 --world-size 8 --allow-plaintext-listen
  MANIPLE_WORKER_ORPHAN_GRACE_S=0 maniple worker --listen unix:/run/rank0.sock

Then, where clients connect: maniple control-plane --worker-addresses ADDRESS
"""


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="maniple worker",
        usage="maniple worker [FLAGS]",
        description="Run the ranks of one group on this machine, for a control plane elsewhere. Which model they "
        "load comes from there.",
        epilog=_EPILOG,
    )
    add_flags(parser, WorkerConfig)
    return parser


def read_config(arguments: Sequence[str], environment: Mapping[str, str]) -> WorkerConfig:
    """Return the configuration that flags and environment ask for.

    Raises:
        ConfigurationError: with every fault there is.
    """
    parser = _parser()
    known, unknown = parser.parse_known_args(list(arguments))
    flags = flag_texts(known, WorkerConfig)
    # The words behind an unknown flag are its values.
    strange = [text for text in unknown if text.startswith("-")] or unknown
    faults: list[Fault] = [(text, "", f"is not a known flag{parser.meant(text)}") for text in strange]
    values, unreadable = read_settings(WorkerConfig, flags, environment)
    faults += unreadable
    launched = launched_by_torchrun(environment, faults)
    values = {**launched.values, **values}
    config = WorkerConfig(**{"world_size": max(values.get("tensor_parallel_size", 1), 1), **values})
    faults += broken_rules(config)
    config = _resolve(config, launched, faults)
    if faults:
        raise ConfigurationError(faults)
    return config


def _resolve(config: WorkerConfig, launched: Launched, faults: list[Fault]) -> WorkerConfig:
    """Fill in what follows from other values; add what does not fit together to ``faults``."""
    config = dataclasses.replace(
        config,
        probe_listen=next_address(config.probe_listen, config.port_offset),
        metrics_listen=next_address(config.metrics_listen, config.port_offset),
        port_offset=0,
    )
    if config.node_rank:
        if config.rank or launched.values:
            which = "torchrun, which names every rank" if launched.values else f"--rank, which is {config.rank}"
            faults.append(("node_rank", config.node_rank, f"must not be given beside {which}"))
        else:
            config = dataclasses.replace(config, rank=config.node_rank * config.tensor_parallel_size, node_rank=0)
    num_here = max(config.tensor_parallel_size, launched.num_here)
    if config.rank + config.tensor_parallel_size > config.world_size:
        rule = f"must be below --world-size, which is {config.world_size}"
        if config.tensor_parallel_size > 1:
            rule = f"with {config.tensor_parallel_size - 1} more behind it, {rule}"
        faults.append(("rank", config.rank, rule))
    if launched.values and config.tensor_parallel_size > 1:
        rule = "must be 1 under torchrun, which starts a process for every rank itself"
        faults.append(("tensor_parallel_size", config.tensor_parallel_size, rule))
    if rule := ids_fit_rule(len(config.device_ids), num_here):
        faults.append(("device_ids", config.device_ids, rule))
    faults += kernel_faults_of(config, config.device)
    listen, health_listen = config.listen, config.health_listen
    faults += _tls_faults(config)
    if _address_rule(listen):
        return config
    if num_here > 1 and (listen.startswith("unix:") or listen.endswith(":0")):
        faults.append(("listen", listen, "must be HOST:PORT with a port that is not 0, for several ranks"))
    health_listen = health_listen or beside(listen, num_here)
    if listen == health_listen and not listen.endswith(":0"):
        faults.append(("health_listen", health_listen, "must differ from --listen"))
    elif not _address_rule(config.health_listen or listen):
        faults += _port_faults(listen, config.health_listen, num_here)
    for name, others in (
        ("probe_listen", (listen, health_listen)),
        ("metrics_listen", (listen, health_listen, config.probe_listen)),
    ):
        address = getattr(config, name)
        if address and not _address_rule(address):
            faults += _port_range_faults(name, address, [one for one in others if one], num_here)
    if config.metrics_listen and not metrics_server.is_installed():
        faults.append(("metrics_listen", config.metrics_listen, metrics_server.MISSING))
    if not config.tls_certificate and not config.allow_plaintext_listen:
        # The default of the second has the host of the first: one fault is enough.
        open_ones = {"listen": listen, "health_listen": config.health_listen or "unix:"}
        faults += [(name, each, _OPEN_RULE) for name, each in open_ones.items() if not is_private(each)]
    return dataclasses.replace(
        config,
        listen=next_address(listen, launched.index),
        health_listen=next_address(health_listen, launched.index),
        probe_listen=next_address(config.probe_listen, launched.index),
        metrics_listen=next_address(config.metrics_listen, launched.index),
        device_ids=config.device_ids[launched.index : launched.index + 1] if launched.values else config.device_ids,
    )


_OPEN_RULE = (
    "can be reached by others, who would see prompts and command the worker: needs --tls-certificate, --tls-key and "
    "--tls-client-ca, or --allow-plaintext-listen on a network that encrypts and admits nobody else"
)


def kernel_faults_of(config: WorkerConfig, device: str) -> list[Fault]:
    """Find what a rank on this kind of device cannot do; where it is auto, what none can."""
    return kernel_faults(
        device,
        attention_backend=config.attention_backend,
        torch_compile=config.torch_compile,
        tune_kernels=config.tune_kernels,
    )


def _tls_faults(config: WorkerConfig) -> list[Fault]:
    """Ask for all of the three files or none."""
    given = {name: getattr(config, name) for name in TLS_FIELDS.values()}
    if not any(given.values()):
        rule = "needs --tls-certificate, --tls-key and --tls-client-ca"
        return [("tls_client_names", config.tls_client_names, rule)] if config.tls_client_names else []
    rule = "must be given, too: a worker shows a certificate and asks for one"
    return [(name, value, rule) for name, value in given.items() if not value]


def _port_range_faults(name: str, address: str, others: Sequence[str], num_here: int) -> list[Fault]:
    """Find a port for probes or metrics that does not exist, or that another server takes."""
    port = _port(address)
    if num_here > 1 and port == 0:
        return [(name, address, "must be HOST:PORT with a port that is not 0, for several ranks")]
    if port > _LAST_PORT - num_here + 1:
        return [(name, address, f"must have a port up to {_LAST_PORT - num_here + 1}")]
    for other in others:
        same = other == address if port == 0 else _port(other) and abs(_port(other) - port) < num_here
        if same and not address.endswith(":0"):
            return [(name, address, f"must be {num_here} ports or more from {other}")]
    return []


def _port_faults(listen: str, health_listen: str, num_here: int) -> list[Fault]:
    """Find ports that the ranks here would take and that do not exist, or that two servers would take.

    Args:
        listen: of the first rank; the others have the next ports.
        health_listen: the same for their health servers; empty: they have the ports behind those of ``listen``.
        num_here: ranks on this machine.
    """
    ranks = f"{num_here} ranks" if num_here > 1 else "one rank"
    faults: list[Fault] = []
    listen_port, health_port = _port(listen), _port(health_listen) if health_listen else 0
    last = _LAST_PORT - (num_here if health_listen else 2 * num_here) + 1
    if listen_port > last:
        servers = "servers" if health_listen else "servers and their health servers"
        faults.append(("listen", listen, f"must have a port up to {last}: {servers} of {ranks} take the next ones"))
    if health_port > _LAST_PORT - num_here + 1:
        rule = f"must have a port up to {_LAST_PORT - num_here + 1}: health servers of {ranks} take the next ones"
        faults.append(("health_listen", health_listen, rule))
    same_host = listen.rpartition(":")[0] == health_listen.rpartition(":")[0]
    if same_host and listen_port and health_port and abs(listen_port - health_port) < num_here:
        faults.append(("health_listen", health_listen, f"must be {num_here} ports or more from --listen, for {ranks}"))
    return faults


def _port(address: str) -> int:
    """Return the port; 0 for a Unix socket, which has none."""
    return 0 if address.startswith("unix:") else int(address.rpartition(":")[2])


def beside(listen: str, offset: int) -> str:
    """Return the default address of the health server."""
    return f"{listen}-health" if listen.startswith("unix:") else next_address(listen, offset)


def next_address(address: str, offset: int) -> str:
    """Return ``address`` with a port that is ``offset`` higher; port 0 and Unix sockets have none."""
    host, _, port = address.rpartition(":")
    if address.startswith("unix:") or not port.isdecimal() or port == "0":
        return address
    return f"{host}:{int(port) + offset}"


def command_line(config: WorkerConfig) -> list[str]:
    """Return the flags that give ``config`` to another process, without those that are about this one."""
    words: list[str] = []
    for name, one in settings_of(WorkerConfig).items():
        value = getattr(config, name)
        if value is not None and name not in ("parent_fd", "announce_fd"):
            words += flag_words(one.flag, value)
    return words


@dataclass(frozen=True)
class Launched:
    """What a launcher said by the environment: values of fields, and this process's place on its machine."""

    values: Mapping[str, int]
    index: int = 0
    num_here: int = 1


def launched_by_torchrun(environment: Mapping[str, str], faults: list[Fault]) -> Launched:
    """Read what torchrun tells its processes. Flags and MANIPLE_WORKER_* go over it.

    Each rank listens on the port of --listen plus its place on its machine, as under ``maniple worker
    --tensor-parallel-size``. MASTER_ADDR is not needed: rank 0 says in Join where the others find it.
    """
    if "TORCHELASTIC_RUN_ID" not in environment:
        return Launched({})
    read: dict[str, int] = {}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        text = environment.get(name, "")
        is_number = text.isdecimal() and len(text) <= 9
        if not is_number:
            faults.append((name, text, "must be a whole number, as torchrun sets it"))
        read[name] = int(text) if is_number else 0
    values = {"rank": read["RANK"], "world_size": read["WORLD_SIZE"]}
    return Launched(values, read["LOCAL_RANK"], read["LOCAL_WORLD_SIZE"])
