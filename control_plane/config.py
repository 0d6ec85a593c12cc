"""What a control plane can be told, and what it makes of it.

``load_config`` is the only place that looks at flags and environment. A ``ControlPlaneConfig`` that exists is valid.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from control_plane import openai_gateway, span_export
from control_plane.executors.ray_surroundings import in_placement_group
from control_plane.executors.selection import AUTO, EXECUTORS, MP, RAY, REMOTE, UNI, Surroundings, choose_executor
from control_plane.executors.worker_addresses import DNS, address_rule, one_per_rank
from control_plane.model_store import looks_like_path, missing_rule
from control_plane.security_rules import algorithms_rule, knows_callers, plaintext_faults, security_faults
from control_plane.span_export import STANDARD_VARIABLE, endpoint_rule
from service_chassis import metrics_server
from service_chassis.device_ids import KINDS, device_ids_rule, ids_fit_rule
from service_chassis.errors import ConfigurationError
from service_chassis.kernel_rules import kernel_faults
from service_chassis.metrics_server import metrics_address_rule
from service_chassis.server_address import is_wildcard
from service_chassis.settings import (
    Fault,
    above,
    at_least,
    broken_rules,
    one_of,
    read_number,
    read_optional_whole,
    read_settings,
    read_size,
    read_switch,
    read_text,
    read_whole,
    read_wholes,
    read_words,
    setting,
    zero_or_at_least,
)
from service_chassis.telemetry import get_logger

log = get_logger()

MODEL, SERVER, BATCH, CACHE, GROUP, LOGGING = "model", "server", "batch", "KV cache", "workers", "logging"
SECURITY, OBSERVABILITY = "security", "observability"

# What the messages to workers and their tables can hold, and what no machine needs more of.
MOST_TOKENS = 2**31 - 1
MOST_STEP_TOKENS = 2**20
MOST_BLOCKS = 2**31 - 1
MOST_BYTES = 2**50
LONGEST_S = 86_400  # a day
MAX_NAME_CHARS = 256
# Processes of ranks a CPU is asked to run at most; they share its cores, so that more only wait for each other.
MOST_RANKS_PER_CORE = 8


def _listen_rule(value: str) -> str:
    if value.startswith("unix:"):
        path = value.removeprefix("unix:")
        # sun_path holds 108 bytes with its closing zero.
        return "" if 0 < len(path.encode()) < 108 else "must be unix:PATH with a path of 1 to 107 bytes"
    host, colon, port = value.rpartition(":")
    if host and colon and port.isascii() and port.isdecimal() and len(port) <= 5 and int(port) <= 65535:
        return ""
    return "must be HOST:PORT with a port up to 65535 (0: a free one), or unix:PATH"


def _optional_listen_rule(value: str) -> str:
    return _listen_rule(value) if value else ""


def _advertise_rule(value: str) -> str:
    if not value or (value.startswith("unix:") and not _listen_rule(value)):
        return ""
    if address_rule(value) or value.startswith(("unix:", DNS)) or is_wildcard(value):
        return "must be HOST:PORT, with a host and a port that others can connect to, or unix:PATH"
    return ""


_LARGEST_GRAPH, _MOST_GRAPHS = 4096, 256


def _sizes_rule(sizes: tuple[int, ...]) -> str:
    if any(not 1 <= size <= _LARGEST_GRAPH for size in sizes):
        return f"must each be in [1, {_LARGEST_GRAPH}]"
    return f"must be at most {_MOST_GRAPHS}" if len(sizes) > _MOST_GRAPHS else ""


def _name_rule(value: str) -> str:
    return "" if value else "must not be empty"


def _read_groups(text: str) -> tuple[tuple[str, ...], ...]:
    """Read the addresses of groups: groups parted by semicolons, of which one may end the last, addresses by commas."""
    return tuple(map(read_words, read_words(text.removesuffix(";"), ";")))


def _addresses_rule(value: tuple[tuple[str, ...], ...]) -> str:
    addresses = [address for group in value for address in group]
    wrong = next((f"{rule}, not {address}" for address in addresses if (rule := address_rule(address))), "")
    return wrong or ("" if len(set(addresses)) == len(addresses) else "names an address twice")


def _read_names(text: str) -> tuple[str, ...]:
    names = read_words(text)
    if not names:
        raise ValueError("must not be empty")
    return names


def _names_rule(value: tuple[str, ...]) -> str:
    for name in value:
        # A byte that is no UTF-8 comes from a command line as a lone surrogate, which is not printable either.
        if not 1 <= len(name) <= MAX_NAME_CHARS or not name.isprintable():
            return f"must be names of 1 to {MAX_NAME_CHARS} printable characters, in UTF-8"
    return "" if len(set(value)) == len(value) else "names a model twice"


@dataclass(frozen=True, kw_only=True)
class ControlPlaneConfig:
    """One control plane and the group it forms. The docstring under a field is the help text of its flag."""

    model: str = setting("demo", topic=MODEL, read=read_text, rule=lambda v: "" if v else "must not be empty")
    """What to serve: `demo` (a small chat model, fetched once), a directory with safetensors and tokenizer.json, a hub
    id such as `HuggingFaceTB/SmolLM2-135M-Instruct`, a `.gguf` file, or `scripted` (no weights: a hash of the tokens,
    for tests and client authors). Workers that run elsewhere read the same path; where only they have that directory,
    tokenizer and configuration come from rank 0."""

    served_model_name: tuple[str, ...] = setting(
        (), topic=MODEL, read=_read_names, rule=_names_rule, metavar="NAME", many=True
    )
    """Names that requests may use; the first is preferred. Default: the model's own name."""

    dtype: str = setting("auto", topic=MODEL, read=read_text, rule=one_of("auto", "float32", "bfloat16", "float16"))
    """Type of weights and activations: auto, float32, bfloat16, float16. auto: what the checkpoint was saved in."""

    quantization: str = setting("none", topic=MODEL, read=read_text, rule=one_of("none", "int8", "q4"))
    """How weights are kept on a CPU: none, int8 (8 bits), q4 (4 bits; a `.gguf` file keeps the 4 and 8 bits that it
    has). Fewer bytes are read for each token: faster, and less exact, see docs/quantization.md."""

    model_impl: str = setting("auto", topic=MODEL, read=read_text, rule=one_of("auto", "native", "transformers"))
    """Whose code computes the model: native (Llama, Mistral, Qwen2, Qwen3 and what is built like them), transformers
    (other causal language models; needs the extra `transformers` where the workers run), or auto: native where there is
    some. See docs/models.md."""

    max_model_len: int = setting(
        0, topic=MODEL, read=read_whole, rule=zero_or_at_least(2, at_most=MOST_TOKENS), metavar="TOKENS"
    )
    """Prompt and output of one request together, tokens. 0: what the model was trained for."""

    seed: int | None = setting(None, topic=MODEL, read=read_optional_whole, rule=at_least(0, at_most=2**64 - 1))
    """Where the seeds of requests that bring none are drawn from. Default none: drawn from the system, so that two
    servers never repeat each other."""

    batch_invariant: bool = setting(False, topic=MODEL, read=read_switch)
    """Compute every row with the same operations whatever the rest of the batch is, so that outputs are reproducible to
    the bit in float32. Off by default: it costs speed."""

    listen: str = setting("127.0.0.1:50051", topic=SERVER, read=read_text, rule=_listen_rule, metavar="ADDRESS")
    """Where clients connect: HOST:PORT or unix:PATH; port 0 takes a free one. Loopback by default: without TLS and
    authentication others may generate here, and AdminService is served to nobody but this machine."""

    openai_port: int = setting(0, topic=SERVER, read=read_whole, rule=at_least(0, at_most=65535), metavar="PORT")
    """Serve OpenAI's HTTP on this port of --listen's host, through the gateway `smg` (extra `openai`) in a process of
    its own that ends with this one. 0: not at all. It needs a --listen in plaintext that asks nobody who he is: whoever
    reaches the port may generate."""

    advertise_address: str = setting("", topic=SERVER, read=read_text, rule=_advertise_rule, metavar="ADDRESS")
    """Where clients and other control planes reach this one, HOST:PORT or unix:PATH, told to them when another one is
    asked for a group of ours. Default: --listen, which must then be no wildcard such as 0.0.0.0 where workers run
    elsewhere."""

    max_message_bytes: int = setting(4 * 2**20, topic=SERVER, read=read_size, rule=at_least(2**16, at_most=2**30))
    """Largest message a client may send. 4 MiB holds a million token ids, and is what gRPC clients allow by default."""

    max_num_waiting: int = setting(
        1024, topic=SERVER, read=read_whole, rule=at_least(1, at_most=1_000_000), metavar="REQUESTS"
    )
    """Requests that may wait for a place in the batch; more are refused with RESOURCE_EXHAUSTED and a time to come
    back. Some batches deep: who waits longer is better served elsewhere."""

    drain_timeout_s: float = setting(
        30.0, topic=SERVER, read=read_number, rule=at_least(0, at_most=LONGEST_S), metavar="SECONDS"
    )
    """How long SIGTERM lets requests finish before they end with reason abort. Keep it below the pod's grace."""

    handover: bool = setting(False, topic=SERVER, read=read_switch)
    """On SIGTERM leave the workers, and the requests that run on them, to the next control plane at once: clients
    resume there, and for those that cannot this process reads on. Without it running requests are finished first. Only
    with workers that run elsewhere."""

    resume_grace_s: float = setting(
        30.0, topic=SERVER, read=read_number, rule=above(0, at_most=LONGEST_S), metavar="SECONDS"
    )
    """How long a request that was taken over from another control plane waits for its client to resume."""

    max_num_seqs: int = setting(0, topic=BATCH, read=read_whole, rule=at_least(0, at_most=65536), metavar="ROWS")
    """Rows in the batch: samples computed together. 0: 256 on a GPU, 64 on a CPU, where more rows add little
    throughput and much latency."""

    max_num_batched_tokens: int = setting(
        0, topic=BATCH, read=read_whole, rule=at_least(0, at_most=MOST_STEP_TOKENS), metavar="TOKENS"
    )
    """Token budget of one step; longer prompts are computed in chunks. 0: 2048 on a GPU, 512 on a CPU, which keeps the
    pause that a long prompt puts between two tokens of the others under a second."""

    max_steps_in_flight: int = setting(2, topic=BATCH, read=read_whole, rule=at_least(1, at_most=16), metavar="STEPS")
    """Steps planned ahead of the device. 1: lock step; 2: hides the host behind the device; more hides a network."""

    num_speculative_tokens: int = setting(
        0, topic=BATCH, read=read_whole, rule=at_least(0, at_most=64), metavar="TOKENS"
    )
    """Tokens that a decoding row may try ahead in one step: what followed when its last tokens occurred before, in its
    prompt or output (prompt lookup). What the model would not have sampled is dropped: outputs stay the same. 0: off.
    Needs --max-steps-in-flight 1. Pays where text repeats itself, see docs/speculation.md."""

    prompt_lookup_min: int = setting(3, topic=BATCH, read=read_whole, rule=at_least(1, at_most=64), metavar="TOKENS")
    """How many of a row's last tokens must have occurred before, at least, for tokens to be tried ahead. More tries
    less, and less in vain."""

    prompt_lookup_max: int = setting(5, topic=BATCH, read=read_whole, rule=at_least(1, at_most=64), metavar="TOKENS")
    """How many are compared at most: the place where most of them occurred is taken, the last one of several."""

    block_size: int = setting(16, topic=CACHE, read=read_whole, rule=at_least(1, at_most=1024), metavar="TOKENS")
    """Tokens in one KV block. Smaller shares more of a prefix, larger means shorter tables."""

    num_kv_blocks: int = setting(
        0, topic=CACHE, read=read_whole, rule=at_least(0, at_most=MOST_BLOCKS), metavar="BLOCKS"
    )
    """KV blocks, the null block included. 0: as many as the memory holds."""

    kv_cache_memory_bytes: int = setting(
        0, topic=CACHE, read=read_size, rule=at_least(0, at_most=MOST_BYTES), flag="--kv-cache-memory", metavar="SIZE"
    )
    """Memory for KV blocks on each worker, such as 2GiB. 0: what profiling finds free."""

    gpu_memory_utilization: float = setting(
        0.9, topic=CACHE, read=read_number, rule=above(0, at_most=1), metavar="SHARE"
    )
    """Share of the device's memory (on a CPU: of the memory that is available) that a worker may take in all."""

    enable_prefix_caching: bool = setting(True, topic=CACHE, read=read_switch)
    """Reuse the KV blocks of a prefix that an earlier request computed."""

    tensor_parallel_size: int = setting(
        1, topic=GROUP, read=read_whole, rule=at_least(1, at_most=1024), metavar="RANKS"
    )
    """Workers that share each layer. Must divide the model's attention heads, and divide its KV heads or be a multiple
    of them; a size that does not is refused with those that do."""

    data_parallel_size: int = setting(1, topic=GROUP, read=read_whole, rule=at_least(1, at_most=64), metavar="GROUPS")
    """Groups of workers, each with the whole model. A request goes to the group that has the longest head of its prompt
    cached, unless that one is overloaded; the requests of a lost group go on in another."""

    max_groups: int = setting(0, topic=GROUP, read=read_whole, rule=at_least(0, at_most=1024), metavar="GROUPS")
    """Groups that this control plane owns at most at a time, of those in --worker-addresses; the others are left to
    other control planes. 0: all that are free."""

    on_group_loss: str = setting("reform", topic=GROUP, read=read_text, rule=one_of("reform", "exit"))
    """What follows the loss of a group: reform (start it anew, after half a second and then ever more) or exit (leave
    that to an orchestrator: with no group left the process ends with exit code 3)."""

    max_group_failures: int = setting(
        5, topic=GROUP, read=read_whole, rule=at_least(0, at_most=1_000_000), metavar="FAILURES"
    )
    """How often in a row a group may be lost, or fail to form anew, before it is given up. Two healthy minutes begin
    the count anew."""

    executor: str = setting("auto", topic=GROUP, read=read_text, rule=one_of(*EXECUTORS))
    """Where workers live: uni (in this process), mp (child processes), remote (at --worker-addresses), ray (placed by
    Ray), auto. auto: remote where addresses are given, ray inside a placement group; else mp for a real model, so that
    a worker that computes or crashes does not stop the front, and uni for the scripted one."""

    worker_addresses: tuple[tuple[str, ...], ...] = setting(
        (), topic=GROUP, read=_read_groups, rule=_addresses_rule, metavar="ADDRESSES"
    )
    """Where running workers are: HOST:PORT,HOST:PORT or unix:PATH for each rank in any order, or dns:///NAME:PORT for a
    headless name. Fewer addresses than ranks: each stands for as many ranks on consecutive ports, as `maniple worker
    --tensor-parallel-size` serves them. Several groups are parted by semicolons."""

    ray_address: str = setting("auto", topic=GROUP, read=read_text, rule=lambda v: "" if v else "must not be empty")
    """The Ray cluster for executor ray: auto (the one of this machine, or RAY_ADDRESS), or HOST:PORT."""

    allow_insecure_serialization: bool = setting(False, topic=GROUP, read=read_switch)
    """Let programs call Python functions on workers (collective_rpc of a callable), pickled; the workers need the same
    flag. Off: whoever reaches a worker could run any code there."""

    broadcast_ring: bool = setting(True, topic=GROUP, read=read_switch)
    """Send deltas to child processes (mp) through a ring in shared memory instead of each one's stream, where the
    system has what it takes (Linux). On: it takes half the time and a third of the CPU, see bench/README.md."""

    device: str = setting("auto", topic=GROUP, read=read_text, rule=one_of("auto", *KINDS))
    """What computes: cpu, cuda, auto. auto: cuda where an NVIDIA driver is present. rocm and xpu are known and refused
    with what is missing."""

    device_ids: tuple[int, ...] = setting((), topic=GROUP, read=read_wholes, rule=device_ids_rule, metavar="INDICES")
    """Devices of the ranks that this process starts, by commas, group after group in the order of the ranks; as CUDA
    counts those that CUDA_VISIBLE_DEVICES leaves, from 0. Default: the first ones."""

    num_threads: int = setting(0, topic=GROUP, read=read_whole, rule=at_least(0, at_most=1024), metavar="THREADS")
    """Threads of one worker's forward pass on a CPU. 0: all cores that the process may use, shared with the other ranks
    that may use the same ones."""

    attention_backend: str = setting("auto", topic=GROUP, read=read_text, rule=_name_rule, metavar="NAME")
    """What computes attention: cpu, triton, flashinfer (with the extra of that name), torch (plain, slow), or what a
    package offers under the group of entry points maniple.attention_backends. auto: triton on a GPU, cpu elsewhere."""

    enforce_eager: bool = setting(False, topic=GROUP, read=read_switch)
    """Record no CUDA graphs: workers are ready sooner and take less memory, and every step launches its kernels one by
    one."""

    cuda_graph_sizes: tuple[int, ...] = setting((), topic=GROUP, read=read_wholes, rule=_sizes_rule, metavar="SIZES")
    """Numbers of rows, by commas, for which workers on GPUs record a graph of a decoding step; a step is filled up to
    the next of them, and one with more rows runs without. Default: 1, 2, 4, and ever sparser ones up to
    --max-num-seqs, 512 at most."""

    torch_compile: bool = setting(False, topic=GROUP, read=read_switch)
    """Have torch compile the layers on GPUs, for graphs and for steps without. What was compiled is kept in
    MANIPLE_CACHE over restarts; on one rank, for models of our own."""

    tune_kernels: bool = setting(False, topic=GROUP, read=read_switch)
    """Measure at the first start on a kind of GPU which tiles and warps suit its attention kernels best, minutes once;
    what was found is kept in MANIPLE_CACHE. Off: the table in the source."""

    enable_sleep_mode: bool = setting(False, topic=GROUP, read=read_switch)
    """Start workers so that they can give the memory of weights and KV cache back (`maniple admin sleep --level 1`, or
    2). On a CUDA device it needs the extra `sleep`."""

    sleep_backend: str = setting("auto", topic=GROUP, read=read_text, rule=_name_rule, metavar="NAME")
    """What gives memory back: pages (CPU), torch-memory-saver (CUDA), or what a package offers under the group of entry
    points maniple.sleep_backends. auto: the one for the device."""

    sleep_directory: str = setting("", topic=GROUP, read=read_text, metavar="DIRECTORY")
    """Where workers on a CPU keep the weights while they sleep at level 1, in files without a name that go with the
    process; it should be on a disk. Default: where the system has its temporary files."""

    heartbeat_timeout_s: float = setting(
        5.0, topic=GROUP, read=read_number, rule=above(0, at_most=LONGEST_S), metavar="SECONDS"
    )
    """A worker not heard for so long on one of its connections is lost. Well above the pauses of a busy host."""

    lease_s: float = setting(3.0, topic=GROUP, read=read_number, rule=above(0, at_most=LONGEST_S), metavar="SECONDS")
    """Silence of its owner after which a worker may be granted to another control plane."""

    step_timeout_s: float = setting(
        10.0, topic=GROUP, read=read_number, rule=above(0, at_most=LONGEST_S), metavar="SECONDS"
    )
    """How long one step may take, on top of its profiled cost, before the group counts as stuck."""

    report_interval_s: float = setting(
        0.1, topic=GROUP, read=read_number, rule=at_least(0.01, at_most=60), metavar="SECONDS"
    )
    """Between reports of a worker, and heartbeats to it, while steps are outstanding."""

    idle_report_interval_s: float = setting(
        1.0, topic=GROUP, read=read_number, rule=at_least(0.01, at_most=60), metavar="SECONDS"
    )
    """The same while nothing runs."""

    startup_timeout_s: float = setting(
        600.0, topic=GROUP, read=read_number, rule=above(0, at_most=LONGEST_S), metavar="SECONDS"
    )
    """How long each stage of forming a group may take; loading a large model from a slow disk sets the size."""

    tls_certificate: str = setting("", topic=SECURITY, read=read_text, metavar="FILE")
    """This server's certificate with its chain, PEM. With it --listen speaks TLS only; a file that is replaced is taken
    for new connections, without ending streams."""

    tls_key: str = setting("", topic=SECURITY, read=read_text, metavar="FILE")
    """The certificate's private key, PEM, unencrypted."""

    tls_client_ca: str = setting("", topic=SECURITY, read=read_text, metavar="FILE")
    """Authorities, PEM, one of which must have signed the certificate that every client then has to show. Without
    --auth-callers and --auth-jwks such a client has the scope inference."""

    auth_callers: str = setting("", topic=SECURITY, read=read_text, metavar="FILE")
    """Who may call what: a TOML file of callers with their scopes, known by a bearer token or by a name in their
    certificate; see docs/security.md. Read again when it changes."""

    auth_jwks: str = setting("", topic=SECURITY, read=read_text, metavar="FILE")
    """Public keys (JWKS) of the identity provider whose tokens (JWT) are accepted. Read again when it changes."""

    auth_jwt_issuer: str = setting("", topic=SECURITY, read=read_text, metavar="NAME")
    """What tokens must say in iss."""

    auth_jwt_audience: str = setting("", topic=SECURITY, read=read_text, metavar="NAME")
    """What tokens must say in aud."""

    auth_jwt_algorithms: tuple[str, ...] = setting(
        ("RS256", "ES256", "EdDSA"), topic=SECURITY, read=read_words, rule=algorithms_rule, metavar="ALGORITHMS"
    )
    """Signatures of tokens that are accepted, by commas."""

    admin_listen: str = setting("", topic=SECURITY, read=read_text, rule=_optional_listen_rule, metavar="ADDRESS")
    """Where AdminService is served instead of --listen. On a Unix socket or the loopback whoever can connect may
    administrate, unless callers are known by tokens."""

    probe_listen: str = setting("", topic=SECURITY, read=read_text, rule=_optional_listen_rule, metavar="ADDRESS")
    """Where grpc.health.v1, and nothing else, is served in plaintext too, for probes that speak no TLS."""

    max_requests_per_caller: int = setting(
        0, topic=SECURITY, read=read_whole, rule=at_least(0, at_most=1_000_000), metavar="REQUESTS"
    )
    """Requests that one caller may have at a time, running and waiting. 0: any number."""

    max_waiting_per_caller: int = setting(
        0, topic=SECURITY, read=read_whole, rule=at_least(0, at_most=1_000_000), metavar="REQUESTS"
    )
    """Requests of one caller that may wait. 0: half of --max-num-waiting, so that nobody fills the queue alone."""

    max_concurrent_streams: int = setting(
        4096, topic=SECURITY, read=read_whole, rule=at_least(16, at_most=1_000_000), metavar="STREAMS"
    )
    """Calls at a time on one connection. More wait in the client, which sees nothing of that."""

    relay_tls_ca: str = setting("", topic=SECURITY, read=read_text, metavar="FILE")
    """Authorities, PEM, of other control planes, when a call is passed on to the owner of a group. Default, with
    --tls-certificate: --tls-client-ca, else the system's. The own certificate is shown to them."""

    relay_tls_server_name: str = setting("", topic=SECURITY, read=read_text, metavar="NAME")
    """What their certificates must be for, where that is not the host of their address."""

    relay_token: str = setting("", topic=SECURITY, read=read_text, metavar="FILE")
    """A bearer token with the scope relay, where control planes are known to each other by a token. Only with it, or
    with a certificate of that scope, may one pass calls on in the name of its clients."""

    rank_tls_ca: str = setting("", topic=SECURITY, read=read_text, metavar="FILE")
    """Authorities, PEM, of workers that run elsewhere. They are then reached over TLS only; Unix sockets are not."""

    rank_tls_certificate: str = setting("", topic=SECURITY, read=read_text, metavar="FILE")
    """The certificate to show to workers, PEM. It commands them: let their --tls-client-ca sign nothing else, or name
    it in their --tls-client-names."""

    rank_tls_key: str = setting("", topic=SECURITY, read=read_text, metavar="FILE")
    """Its private key, PEM, unencrypted."""

    rank_tls_server_name: str = setting("", topic=SECURITY, read=read_text, metavar="NAME")
    """What the certificates of workers must be for, where that is not the host of their address: with dns:/// they are
    reached by IP."""

    allow_plaintext_workers: bool = setting(False, topic=SECURITY, read=read_switch)
    """Send prompts to workers over a network in plaintext, and let ranks in Ray answer so, with snapshots too.
    Only on a network that encrypts and admits nobody else."""

    log_level: str = setting("info", topic=LOGGING, read=read_text, rule=one_of("debug", "info", "warning", "error"))
    """Least severity that is logged: debug (one line a step), info (one a request), warning, error."""

    log_format: str = setting("auto", topic=LOGGING, read=read_text, rule=one_of("auto", "console", "json"))
    """auto, console or json. auto: console on a terminal, JSON on a pipe."""

    metrics_listen: str = setting("", topic=OBSERVABILITY, read=read_text, rule=metrics_address_rule, metavar="ADDRESS")
    """Where Prometheus finds metrics, HOST:PORT, over HTTP in plaintext and for whoever connects; no prompts, no
    outputs. Needs the extra `observability`. Default: nowhere, and nothing is measured."""

    otlp_endpoint: str = setting("", topic=OBSERVABILITY, read=read_text, rule=endpoint_rule, metavar="URL")
    """Where a collector takes spans of requests by OTLP over gRPC, such as http://127.0.0.1:4317. Needs the extra
    `observability`. Default: OTEL_EXPORTER_OTLP_ENDPOINT; without either none are made."""

    profile_directory: str = setting("", topic=OBSERVABILITY, read=read_text, metavar="DIRECTORY")
    """Where profiles of this process are put (`maniple admin start-profile`). Default: where the system has its
    temporary files."""

    record_deltas: str = setting("", topic=LOGGING, read=read_text, metavar="FILE")
    """Record every delta and result to FILE, which `maniple replay FILE` checks offline; an existing log is continued.
    Prompts, outputs and resume tokens are in it, and nothing else limits its size: for finding a fault, not for always.
    Only its owner may read it."""

    trace: str = setting("", topic=LOGGING, read=read_text, metavar="FILE")
    """Write to FILE when each step was planned, sent, queued, executed, sampled and published, for ui.perfetto.dev; a
    file that is there is replaced. No prompts, no outputs; 256 MiB at most, a quarter of an hour of a busy rank."""

    def __post_init__(self) -> None:
        faults = broken_rules(self) or _contradictions(self)
        if faults:
            raise ConfigurationError(faults)

    @property
    def num_groups(self) -> int:
        """How many groups this control plane knows."""
        return len(self.worker_addresses) or self.data_parallel_size

    @property
    def is_scripted(self) -> bool:
        """Whether the model is the scripted one, which needs neither weights nor torch."""
        return self.model == "scripted" or self.model.startswith("scripted:")


def _contradictions(config: ControlPlaneConfig) -> list[Fault]:
    """Find values that are fine alone and not together."""
    faults: list[Fault] = []
    if config.num_kv_blocks == 1:
        faults.append(("num_kv_blocks", 1, "must be at least 2: block 0 takes padding writes"))
    if config.num_speculative_tokens and config.max_steps_in_flight != 1:
        rule = "needs --max-steps-in-flight 1: how many were accepted is known with the result, before the next step"
        faults.append(("num_speculative_tokens", config.num_speculative_tokens, rule))
    if config.prompt_lookup_min > config.prompt_lookup_max:
        rule = f"must be at most --prompt-lookup-max {config.prompt_lookup_max}"
        faults.append(("prompt_lookup_min", config.prompt_lookup_min, rule))
    if config.trace and config.trace == config.record_deltas:
        faults.append(("trace", config.trace, "must be another file than --record-deltas"))
    if config.num_kv_blocks and config.kv_cache_memory_bytes:
        faults.append(
            ("kv_cache_memory_bytes", config.kv_cache_memory_bytes, "must not be set together with --num-kv-blocks")
        )
    if config.batch_invariant and config.tensor_parallel_size > 1 and not config.is_scripted:
        faults.append(("batch_invariant", True, "holds on one rank: --tensor-parallel-size must be 1"))
    if config.quantization != "none" and (config.device == "cuda" or config.is_scripted):
        what = "the scripted model has no weights" if config.is_scripted else "is for the CPU, not for --device cuda"
        faults.append(("quantization", config.quantization, what))
    if config.model_impl != "auto" and config.is_scripted:
        faults.append(("model_impl", config.model_impl, "the scripted model has code of its own: must be auto"))
    if config.model_impl == "transformers":
        for name, unset in (("quantization", "none"), ("batch_invariant", False)):
            if (value := getattr(config, name)) != unset:
                faults.append((name, value, "is for models of our own code, not for --model-impl transformers"))
    if 0 < config.max_num_batched_tokens < config.max_num_seqs:
        faults.append(
            (
                "max_num_batched_tokens",
                config.max_num_batched_tokens,
                f"must be at least --max-num-seqs {config.max_num_seqs}: every decoding row takes one token of a step",
            )
        )
    if config.worker_addresses and config.data_parallel_size not in (1, len(config.worker_addresses)):
        faults.append(
            (
                "data_parallel_size",
                config.data_parallel_size,
                f"must be the number of groups in --worker-addresses, {len(config.worker_addresses)}",
            )
        )
    if config.max_groups and not config.worker_addresses:
        faults.append(("max_groups", config.max_groups, "needs --worker-addresses: all other groups are its own"))
    faults += security_faults(config)
    faults += _metrics_faults(config)
    if config.openai_port:
        faults += _gateway_faults(config)
    for name in ("heartbeat_timeout_s", "lease_s"):
        # Two lost reports in a row must not look like a death.
        least = 2 * max(config.report_interval_s, config.idle_report_interval_s)
        twice = "twice --report-interval-s and --idle-report-interval-s"
        if getattr(config, name) < least:
            faults.append(
                (
                    name,
                    getattr(config, name),
                    f"must be at least {least:g}, {twice}",
                )
            )
    return faults


def _metrics_faults(config: ControlPlaneConfig) -> list[Fault]:
    address = config.metrics_listen
    others = (config.listen, config.admin_listen, config.probe_listen)
    is_taken = address in others or (config.openai_port and address.endswith(f":{config.openai_port}"))
    if address and is_taken and not address.endswith(":0"):
        return [("metrics_listen", address, "must be an address of its own")]
    return []


def _gateway_faults(config: ControlPlaneConfig) -> list[Fault]:
    """Find why the gateway could not reach this server."""
    rule = ""
    if config.listen.startswith("unix:"):
        rule = "needs --listen HOST:PORT: the gateway connects over TCP"
    elif config.tls_certificate or knows_callers(config):
        rule = (
            "must be 0 with TLS or authentication: the gateway beside us has no credentials; start one of your own, "
            "with them, see docs/doors.md"
        )
    elif config.listen.rpartition(":")[2] == str(config.openai_port):
        rule = f"must differ from the port of --listen, {config.listen}"
    return [("openai_port", config.openai_port, rule)] if rule else []


def load_config(flags: Mapping[str, str], environ: Mapping[str, str] = os.environ) -> ControlPlaneConfig:
    """Resolve flag > environment (MANIPLE_*) > default.

    Args:
        flags: the text of the flags that were given, by field name.
        environ: the process's environment.
    Raises:
        ConfigurationError: with every fault that can be found without starting anything.
    """
    if STANDARD_VARIABLE in environ:
        environ = {"MANIPLE_OTLP_ENDPOINT": environ[STANDARD_VARIABLE], **environ}
    values, faults = read_settings(ControlPlaneConfig, flags, environ)
    unreadable = {field for field, _, _ in faults}
    try:
        config = ControlPlaneConfig(**values)
    except ConfigurationError as error:
        # An unreadable value has its default by now, so that a contradiction with it would be no news.
        faults += [fault for fault in error.faults if fault[0] not in unreadable]
    if "model" not in unreadable:
        faults += model_faults(values.get("model", "demo"), workers_elsewhere=_may_be_elsewhere(values))
    if faults:
        raise ConfigurationError(faults)
    return config


_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def _may_be_elsewhere(values: Mapping[str, object]) -> bool:
    """Whether workers may run on other machines, before anything is chosen for ``auto``."""
    asked_for = values.get("executor", AUTO)
    if asked_for == AUTO:
        return bool(values.get("worker_addresses")) or in_placement_group()
    return asked_for in (REMOTE, RAY)


def model_faults(model: str, *, workers_elsewhere: bool = False) -> list[Fault]:
    """Say what is wrong with a model's name before anything is fetched or opened."""
    if not model or model == "demo" or model == "scripted" or model.startswith("scripted:"):
        return []
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            return [("model", model, "is a directory without config.json")]
        if not any(path.glob("*.safetensors")):
            return [("model", model, "is a directory without *.safetensors")]
        return []
    if path.is_file():
        return [] if path.suffix == ".gguf" else [("model", model, "is a file, but not a .gguf file")]
    if rule := missing_rule(model, workers_elsewhere=workers_elsewhere):
        return [("model", model, rule)]
    if not looks_like_path(model) and not _HUB_ID.fullmatch(model):
        return [("model", model, "is neither a path that exists nor a hub id such as owner/name")]
    return []


def gpu_is_present() -> bool:
    """Ask whether an NVIDIA driver is loaded, without torch."""
    return Path("/dev/nvidiactl").exists()


def count_gpus() -> int:
    """Count the NVIDIA devices of this machine, without torch."""
    return sum(path.name.removeprefix("nvidia").isdecimal() for path in Path("/dev").glob("nvidia[0-9]*"))


def resolve_auto(
    config: ControlPlaneConfig, *, has_gpu: bool, on_terminal: bool, num_gpus: int = 0, workers_elsewhere: bool = False
) -> ControlPlaneConfig:
    """Replace what was left to the server by what it chose, and log it.

    ``dtype``, ``max_model_len`` and the number of blocks stay open: a worker resolves them from the checkpoint and its
    memory.

    Args:
        config: as it was asked for.
        has_gpu: an NVIDIA driver is loaded.
        on_terminal: logs go to a person.
        num_gpus: on this machine; 0: unknown, whether ranks fit is then seen when they start.
        workers_elsewhere: no worker may be a child of this process.
    Raises:
        ConfigurationError: there is no executor for what was asked.
    """
    device = config.device
    if device == "auto":
        device = "cuda" if has_gpu and not config.is_scripted else "cpu"
    on_gpu = device == "cuda"
    world_size = config.tensor_parallel_size
    if world_size == 1 and config.worker_addresses:
        world_size = len(config.worker_addresses[0])  # several addresses are several ranks, without saying so twice
    surroundings = Surroundings(
        world_size=world_size,
        num_local_devices=num_gpus if on_gpu and num_gpus else world_size,
        has_worker_addresses=bool(config.worker_addresses),
        in_ray_placement_group=in_placement_group(),
        ray_is_installed=importlib.util.find_spec("ray") is not None,
        workers_elsewhere=workers_elsewhere,
        wants_own_process=not config.is_scripted,
    )
    choice = choose_executor(config.executor, surroundings)
    if not choice.executor:
        raise ConfigurationError([("executor", config.executor, choice.reason)])
    faults = _owner_faults(config, choice.executor, world_size)
    if config.openai_port and not openai_gateway.is_installed():
        faults.append(("openai_port", config.openai_port, openai_gateway.MISSING))
    if config.metrics_listen and not metrics_server.is_installed():
        faults.append(("metrics_listen", config.metrics_listen, metrics_server.MISSING))
    if config.otlp_endpoint and not span_export.is_installed():
        faults.append(("otlp_endpoint", config.otlp_endpoint, span_export.MISSING))
    faults += _device_faults(config, choice.executor, device, world_size)
    if choice.executor in (UNI, MP) and not on_gpu:
        faults += _crowding_faults(config, world_size, os.cpu_count() or 1)
    if choice.executor in (UNI, MP):
        faults += kernel_faults(
            device,
            attention_backend=config.attention_backend,
            torch_compile=config.torch_compile,
            tune_kernels=config.tune_kernels,
        )
    if faults:
        raise ConfigurationError(faults)
    max_num_seqs = config.max_num_seqs or (256 if on_gpu else 64)
    if config.max_num_batched_tokens and not config.max_num_seqs:
        max_num_seqs = min(max_num_seqs, config.max_num_batched_tokens)
    resolved = dataclasses.replace(
        config,
        device=device,
        executor=choice.executor,
        tensor_parallel_size=world_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens or max(max_num_seqs, 2048 if on_gpu else 512),
        served_model_name=config.served_model_name or (_own_name(config.model),),
        log_format=config.log_format if config.log_format != "auto" else ("console" if on_terminal else "json"),
    )
    chosen = {
        one.name: getattr(resolved, one.name)
        for one in dataclasses.fields(config)
        if getattr(resolved, one.name) != getattr(config, one.name)
    }
    if chosen:
        log.info("config.resolved", **chosen)
    return resolved


def _owner_faults(config: ControlPlaneConfig, executor: str, world_size: int) -> list[Fault]:
    """Find what the owner of workers that live where ``executor`` says cannot be told."""
    if executor in (UNI, MP):
        rule = f"needs workers that outlive this process (remote or ray): those of --executor {executor} end with it"
        return [("handover", "on", rule)] if config.handover else []
    if executor == REMOTE and (faults := _address_faults(config, world_size)):
        return faults
    if executor == REMOTE and config.num_threads:
        return [("num_threads", config.num_threads, "is not told to workers that run: give it to `maniple worker`")]
    if executor == REMOTE and (faults := _started_with_faults(config)):
        return faults
    if is_wildcard(config.listen) and not config.advertise_address:
        rule = "needs --advertise-address where workers run elsewhere: nobody can connect to a wildcard"
        return [("listen", config.listen, rule)]
    return plaintext_faults(config, executor)


def _started_with_faults(config: ControlPlaneConfig) -> list[Fault]:
    """Find flags that workers had to be started with."""
    given = {
        "enable_sleep_mode": "on" if config.enable_sleep_mode else "",
        "sleep_backend": config.sleep_backend if config.sleep_backend != "auto" else "",
        "sleep_directory": config.sleep_directory,
        "attention_backend": config.attention_backend if config.attention_backend != "auto" else "",
        "torch_compile": "on" if config.torch_compile else "",
        "tune_kernels": "on" if config.tune_kernels else "",
    }
    rule = "is not told to workers that run: give it to `maniple worker`"
    return [(name, value, rule) for name, value in given.items() if value]


def _address_faults(config: ControlPlaneConfig, world_size: int) -> list[Fault]:
    """Find groups whose addresses can never stand for all ranks; what a name stands for is seen at the start."""
    faults: list[Fault] = []
    for group in config.worker_addresses:
        if any(address.startswith(DNS) for address in group):
            continue
        shown, ranks = ",".join(group), f"{world_size} ranks" if world_size > 1 else "one rank"
        targets = one_per_rank(group, world_size)
        beyond = [one for one in targets if not one.startswith("unix:") and int(one.rpartition(":")[2]) > 65535]
        if not targets:
            rule = f"must be as many as the ranks, or stand for as many each: {len(group)} do not fit {ranks}"
            faults.append(("worker_addresses", shown, rule))
        elif beyond:
            faults.append(("worker_addresses", shown, f"stand for {ranks}, the last at {beyond[-1]}, beyond all ports"))
    return faults


def _device_faults(config: ControlPlaneConfig, executor: str, device: str, world_size: int) -> list[Fault]:
    """Find why ranks cannot be put on the devices that are named."""
    if not config.device_ids:
        return []
    if executor == REMOTE:
        rule = "is not told to workers that run: give it to `maniple worker`"
    elif executor == RAY:
        rule = "is Ray's to decide: it gives each rank a device"
    elif device == "cpu":
        rule = "needs --device cuda: a CPU has no devices to choose from"
    else:
        rule = ids_fit_rule(len(config.device_ids), world_size * config.num_groups)
    return [("device_ids", config.device_ids, rule)] if rule else []


def _crowding_faults(config: ControlPlaneConfig, world_size: int, num_cores: int) -> list[Fault]:
    """Refuse more ranks on this machine's cores than would ever come up."""
    most = max(16, MOST_RANKS_PER_CORE * num_cores)
    if world_size * config.num_groups <= most:
        return []
    of = "" if config.num_groups == 1 else f" in {config.num_groups} groups"
    rule = f"must be at most {most // config.num_groups}{of}: this machine has {num_cores} cores for its ranks"
    return [("tensor_parallel_size", config.tensor_parallel_size, rule)]


def _own_name(model: str) -> str:
    if model.startswith("scripted"):
        return "scripted"
    path = Path(model).expanduser()
    if path.exists():
        return path.resolve().name.removesuffix(".gguf")
    return path.name if looks_like_path(model) else model
