"""The configuration: flag > environment > default, all faults at once, nothing invalid ever exists."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from pathlib import Path

import pytest

from control_plane.assembly import build_executor
from control_plane.config import ControlPlaneConfig, load_config, model_faults, resolve_auto
from service_chassis.errors import ConfigurationError
from service_chassis.ids import Rank
from service_chassis.settings import (
    field_docstrings,
    read_number,
    read_optional_whole,
    read_size,
    read_whole,
    settings_of,
)
from worker_service.config import WorkerConfig, read_config


def test_flag_wins_over_environment_and_environment_over_default() -> None:
    environ = {"MANIPLE_BLOCK_SIZE": "32", "MANIPLE_MAX_NUM_SEQS": "7"}
    config = load_config({"block_size": "8", "model": "scripted"}, environ)
    assert (config.block_size, config.max_num_seqs, config.max_steps_in_flight) == (8, 7, 2)


def test_every_fault_is_reported_at_once_with_field_value_and_rule() -> None:
    flags = {
        "max_num_seqs": "many",
        "listen": "localhost",
        "gpu_memory_utilization": "1.5",
        "executor": "abacus",
        "model": "/nowhere/at/all",
    }
    with pytest.raises(ConfigurationError) as caught:
        load_config(flags, {"MANIPLE_BLOCK_SIZE": "x"})
    faults = {field: (value, rule) for field, value, rule in caught.value.faults}
    assert set(faults) == {*flags, "block_size"}
    assert faults["max_num_seqs"] == ("many", "must be a whole number")
    assert faults["block_size"] == ("x", "must be a whole number (from MANIPLE_BLOCK_SIZE)")
    assert faults["gpu_memory_utilization"] == (1.5, "must be above 0 and at most 1")
    assert faults["model"] == ("/nowhere/at/all", "does not exist")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_steps_in_flight", 0),
        ("max_steps_in_flight", 17),
        ("block_size", 0),
        ("num_kv_blocks", 1),
        ("num_kv_blocks", -3),
        ("gpu_memory_utilization", 0.0),
        ("gpu_memory_utilization", float("nan")),
        ("lease_s", float("inf")),
        ("lease_s", 1.5),
        ("heartbeat_timeout_s", 0.5),
        ("step_timeout_s", 0.0),
        ("tensor_parallel_size", 0),
        ("worker_addresses", (("a",),)),
        ("worker_addresses", (("a:0",),)),
        ("worker_addresses", (("unix:",),)),
        ("worker_addresses", (("dns:///workers",),)),
        ("worker_addresses", (("a:1", "b:1"), ("a:1",))),
        ("dtype", "int4"),
        ("device", "abacus"),
        ("device_ids", (0, 1, 0)),
        ("device_ids", (0, -1)),
        ("device_ids", (1024,)),
        ("cuda_graph_sizes", (4, 0)),
        ("cuda_graph_sizes", (4097,)),
        ("cuda_graph_sizes", tuple(range(1, 258))),
        ("attention_backend", ""),
        ("listen", "unix:"),
        ("listen", "unix:" + "x" * 108),
        ("listen", "127.0.0.1:70000"),
        ("listen", ":50051"),
        ("advertise_address", "10.0.0.1"),
        ("advertise_address", "10.0.0.1:0"),
        ("advertise_address", "0.0.0.0:50051"),
        ("advertise_address", "[::]:50051"),
        ("advertise_address", "unix:"),
        ("advertise_address", "dns:///front:50051"),
        ("seed", -1),
        ("seed", 2**64),
        ("served_model_name", ("a", "a")),
        ("max_message_bytes", 100),
        ("max_model_len", 1),
        ("max_model_len", 2**31),
        ("startup_timeout_s", 1e10),
        ("num_threads", 1025),
        ("log_level", "chatty"),
        ("model", ""),
    ],
)
def test_config_refuses_a_value_that_breaks_its_rule(field: str, value: object) -> None:
    with pytest.raises(ConfigurationError) as caught:
        ControlPlaneConfig(**{field: value})  # type: ignore[arg-type]
    assert [fault[0] for fault in caught.value.faults] == [field]


# What people and broken scripts give a number: as a value, and as the text of a flag.
ODD_NUMBERS = (0, 1, -1, 2**31, 2**32, 2**63, 2**64, 10**30, 0.5, 1e-9, 1e10, 1e308, float("nan"), float("inf"))
ODD_TEXTS = (
    *map(str, ODD_NUMBERS),
    "-inf",
    "1e999",
    "9" * 400,
    "9" * 5000,
    "9" * 400 + ".5",
    "0x10",
    "",
    " ",
    "\u0663",
)
READ_AS_NUMBERS = (read_whole, read_optional_whole, read_number, read_size)


def numeric_settings(config_class: type) -> list[str]:
    return [name for name, made in settings_of(config_class).items() if made.read in READ_AS_NUMBERS]


@pytest.mark.parametrize("config_class", [ControlPlaneConfig, WorkerConfig])
def test_every_number_has_an_upper_bound(config_class: type) -> None:
    rules = {name: settings_of(config_class)[name].rule for name in numeric_settings(config_class)}
    rules = {name: rule for name, rule in rules.items() if not name.endswith("_fd")}  # must be open, whatever it is
    assert len(rules) > 8
    assert [name for name, rule in rules.items() if not rule(2**64) or not rule(float("inf"))] == []
    assert [name for name, rule in rules.items() if "e+" in rule(2**64) or "nan" in rule(2**64)] == []


@pytest.mark.parametrize("name", numeric_settings(ControlPlaneConfig))
def test_an_odd_number_is_taken_or_refused_and_nothing_else(name: str) -> None:
    for value in ODD_NUMBERS:
        with contextlib.suppress(ConfigurationError):
            resolve_auto(
                ControlPlaneConfig(**{"model": "scripted", name: value}),  # type: ignore[arg-type]
                has_gpu=False,
                on_terminal=False,
            )
    for text in ODD_TEXTS:
        with contextlib.suppress(ConfigurationError):
            load_config({"model": "scripted", name: text}, {})


@pytest.mark.parametrize("name", numeric_settings(WorkerConfig))
def test_an_odd_number_of_a_worker_is_taken_or_refused_and_nothing_else(name: str) -> None:
    flag = settings_of(WorkerConfig)[name].flag
    for text in ODD_TEXTS:
        with contextlib.suppress(ConfigurationError):
            read_config([f"{flag}={text}"], {})


def test_more_ranks_than_the_cores_can_run_are_refused() -> None:
    config = ControlPlaneConfig(model="scripted", tensor_parallel_size=1024, device="cpu", executor="mp")
    with pytest.raises(ConfigurationError, match="tensor_parallel_size=1024: must be at most"):
        resolve_auto(config, has_gpu=False, on_terminal=False)


@pytest.mark.parametrize("name", ["", "x" * 257, "a\nb", "\x1b[1m", "\udcff"])
def test_a_served_name_that_no_message_can_show_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match="1 to 256 printable"):
        ControlPlaneConfig(served_model_name=("fine", name))
    with pytest.raises(ConfigurationError, match="served_model_name='': must not be empty"):
        load_config({"model": "scripted", "served_model_name": ""}, {})
    assert ControlPlaneConfig(served_model_name=("smol/é 2", "x" * 256)).served_model_name[0] == "smol/é 2"


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"num_kv_blocks": 64, "kv_cache_memory_bytes": 1 << 30}, "kv_cache_memory_bytes"),
        ({"max_num_seqs": 65, "max_num_batched_tokens": 64}, "max_num_batched_tokens"),
        ({"model_impl": "transformers", "quantization": "int8"}, "quantization"),
        ({"model_impl": "transformers", "batch_invariant": True}, "batch_invariant"),
        ({"model": "scripted", "model_impl": "native"}, "model_impl"),
    ],
)
def test_config_refuses_values_that_contradict_each_other(values: dict[str, int], named: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        ControlPlaneConfig(**values)  # type: ignore[arg-type]
    assert [fault[0] for fault in caught.value.faults] == [named]


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("4096", 4096),
        ("2GiB", 2147483648),
        ("512 MiB", 536870912),
        ("1.5G", 1500000000),
        ("3k", 3000),
        ("1ki", 1024),
        ("10b", 10),
    ],
)
def test_sizes_are_read_in_binary_and_decimal_units(text: str, size: int) -> None:
    assert read_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "2 GiB more", "1e9", "2XB"])
def test_sizes_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be a size"):
        read_size(text)


@pytest.mark.parametrize(("text", "value"), [("1", True), ("off", False), ("True", True), ("no", False)])
def test_switches_are_read_from_the_environment(text: str, value: bool) -> None:
    assert load_config({}, {"MANIPLE_ENABLE_PREFIX_CACHING": text}).enable_prefix_caching is value


def test_unknown_variables_are_left_alone() -> None:
    # Kubernetes injects these into every pod of a namespace with a Service called maniple.
    environ = {"MANIPLE_PORT": "tcp://10.0.0.1:50051", "MANIPLE_SERVICE_HOST": "10.0.0.1"}
    assert load_config({}, environ) == ControlPlaneConfig()


def test_every_field_has_a_docstring_and_names_of_its_own() -> None:
    names = [one.name for one in dataclasses.fields(ControlPlaneConfig)]
    docs = field_docstrings(ControlPlaneConfig)
    assert set(docs) == set(names)
    assert all(len(doc) > 20 for doc in docs.values())
    settings = settings_of(ControlPlaneConfig).values()
    assert len({made.flag for made in settings}) == len({made.variable for made in settings}) == len(names)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"model": "scripted"}, ("uni", "cpu", 64, 512, ("scripted",))),
        ({"model": "demo"}, ("mp", "cpu", 64, 512, ("demo",))),
        ({"model": "demo", "executor": "uni"}, ("uni", "cpu", 64, 512, ("demo",))),
        ({"model": "owner/name", "max_num_seqs": "700"}, ("mp", "cpu", 700, 700, ("owner/name",))),
        ({"model": "demo", "max_num_batched_tokens": "24"}, ("mp", "cpu", 24, 24, ("demo",))),
        ({"model": "demo", "served_model_name": "a,b"}, ("mp", "cpu", 64, 512, ("a", "b"))),
    ],
)
def test_auto_is_resolved_without_a_gpu(flags: dict[str, str], expected: tuple[object, ...]) -> None:
    before = load_config(flags, {})
    after = resolve_auto(before, has_gpu=False, on_terminal=False)
    shown = (after.executor, after.device, after.max_num_seqs, after.max_num_batched_tokens, after.served_model_name)
    assert shown == expected
    assert after.log_format == "json"
    assert before == load_config(flags, {}), "the config that was given is not changed"


@pytest.mark.parametrize(
    ("text", "groups", "world_size"),
    [
        ("a:1,b:1, c:1", (("a:1", "b:1", "c:1"),), 3),
        ("dns:///workers.default.svc:50061", (("dns:///workers.default.svc:50061",),), 1),
        (
            "unix:/run/0.sock,unix:/run/1.sock;[::1]:5,[::1]:6;",
            (("unix:/run/0.sock", "unix:/run/1.sock"), ("[::1]:5", "[::1]:6")),
            2,
        ),
    ],
)
def test_worker_addresses_choose_remote_and_say_how_many_ranks(
    text: str, groups: tuple[tuple[str, ...], ...], world_size: int
) -> None:
    config = load_config({"worker_addresses": text, "model": "scripted", "allow_plaintext_workers": "on"}, {})
    assert config.worker_addresses == groups
    after = resolve_auto(config, has_gpu=False, on_terminal=False, workers_elsewhere=True)
    assert (after.executor, after.tensor_parallel_size) == ("remote", world_size)


def test_no_executor_for_what_was_asked_is_a_fault_of_the_configuration() -> None:
    with pytest.raises(ConfigurationError, match="needs to know where the workers are"):
        resolve_auto(load_config({"model": "scripted"}, {}), has_gpu=False, on_terminal=False, workers_elsewhere=True)
    config = load_config({"model": "demo", "executor": "mp", "tensor_parallel_size": "3"}, {})
    with pytest.raises(ConfigurationError, match="has 2 devices on this machine, and 3 ranks are wanted"):
        resolve_auto(config, has_gpu=True, num_gpus=2, on_terminal=False)
    assert resolve_auto(config, has_gpu=True, num_gpus=4, on_terminal=False).executor == "mp"


@pytest.mark.parametrize(
    ("flags", "rule"),
    [
        ({"device_ids": "4,6", "tensor_parallel_size": "2"}, ""),
        ({"device_ids": "4,6", "data_parallel_size": "2"}, ""),
        ({"device_ids": "4,6"}, "must be as many as the ranks here: 2 for one rank"),
        ({"device_ids": "4", "tensor_parallel_size": "2"}, "must be as many as the ranks here: 1 for 2 ranks"),
        ({"device_ids": "4", "device": "cpu"}, "needs --device cuda"),
        ({"device_ids": "4", "worker_addresses": "127.0.0.1:1"}, "give it to `maniple worker`"),
    ],
)
def test_devices_are_named_for_the_ranks_that_are_started_here(flags: dict[str, str], rule: str) -> None:
    config = load_config({"model": "demo"} | flags, {})
    if not rule:
        resolved = resolve_auto(config, has_gpu=True, num_gpus=8, on_terminal=False)
        executors = [build_executor(resolved, group=group) for group in range(resolved.num_groups)]
        lines = [
            one._settings.arguments(Rank(rank), one.world_size, listen="", health_listen="", orphan_grace_s=0)  # type: ignore[attr-defined]
            for one in executors
            for rank in one.ranks
        ]
        assert [line[line.index("--device-ids") + 1] for line in lines] == ["4", "6"]
        return
    with pytest.raises(ConfigurationError, match=rule) as caught:
        resolve_auto(config, has_gpu=True, num_gpus=8, on_terminal=False)
    assert [fault[0] for fault in caught.value.faults] == ["device_ids"]


@pytest.mark.parametrize("executor", ["uni", "mp", "auto"])
def test_handover_is_refused_where_the_workers_end_with_the_process(executor: str) -> None:
    config = load_config({"model": "scripted", "executor": executor, "handover": "true"}, {})
    with pytest.raises(ConfigurationError) as caught:
        resolve_auto(config, has_gpu=False, on_terminal=False)
    ((field, value, rule),) = caught.value.faults
    assert (field, value) == ("handover", "on")
    assert rule.startswith("needs workers that outlive this process")
    elsewhere = {"model": "scripted", "worker_addresses": "localhost:1", "handover": "true"}
    assert resolve_auto(load_config(elsewhere, {}), has_gpu=False, on_terminal=False).handover


@pytest.mark.parametrize("listen", ["0.0.0.0:50051", "[::]:50051"])
def test_wildcard_without_another_address_is_refused_where_workers_run_elsewhere(listen: str) -> None:
    def resolved(**flags: str) -> ControlPlaneConfig:
        config = load_config({"model": "scripted", "listen": listen, **flags}, {})
        return resolve_auto(config, has_gpu=False, on_terminal=False)

    with pytest.raises(ConfigurationError) as caught:
        resolved(worker_addresses="localhost:1")
    assert [fault[:2] for fault in caught.value.faults] == [("listen", listen)]
    assert "needs --advertise-address" in caught.value.faults[0][2]
    for address in ("front:50051", "[fd00::1]:50051", "unix:/run/front.sock"):
        assert resolved(worker_addresses="localhost:1", advertise_address=address).advertise_address == address
    assert resolved().executor == "uni"  # nobody else asks for workers that are its own


@pytest.mark.parametrize(
    ("addresses", "rule"),
    [
        ("a:1,b:1", "must be as many as the ranks, or stand for as many each: 2 do not fit 3 ranks"),
        ("a:1,b:1,c:1;unix:/w", "must be as many as the ranks, or stand for as many each: 1 do not fit 3 ranks"),
        ("a:65534", "stand for 3 ranks, the last at a:65536, beyond all ports"),
    ],
)
def test_worker_addresses_that_can_never_be_all_ranks_are_refused(addresses: str, rule: str) -> None:
    flags = {"model": "scripted", "tensor_parallel_size": "3", "advertise_address": "front:1"}
    flags["allow_plaintext_workers"] = "on"
    with pytest.raises(ConfigurationError) as caught:
        resolve_auto(load_config(flags | {"worker_addresses": addresses}, {}), has_gpu=False, on_terminal=False)
    assert [(field, said) for field, _, said in caught.value.faults] == [("worker_addresses", rule)]
    for fine in ("a:65533", "dns:///workers:65535", "a:1,b:1,c:1;d:7"):
        resolve_auto(load_config(flags | {"worker_addresses": fine}, {}), has_gpu=False, on_terminal=False)


def test_directory_that_only_workers_elsewhere_may_have_is_theirs_to_find() -> None:
    elsewhere = {"worker_addresses": "localhost:1"}
    config = load_config({"model": "/models/of/theirs", **elsewhere}, {})
    resolved = resolve_auto(config, has_gpu=False, on_terminal=False)
    assert resolved.served_model_name == ("theirs",)
    assert load_config({"model": "/models/of/theirs", "executor": "ray"}, {}).model == "/models/of/theirs"
    for flags, rule in (
        ({"model": "/models/of/theirs"}, "does not exist"),
        ({"model": "/models/of/theirs", "executor": "mp"}, "does not exist"),
        ({"model": "./theirs", **elsewhere}, "does not exist here, and a directory on the workers must begin with /"),
        ({"model": "/theirs.gguf", **elsewhere}, "does not exist here, where .gguf files are converted"),
    ):
        with pytest.raises(ConfigurationError) as caught:
            load_config(flags, {})
        assert caught.value.faults == [("model", flags["model"], rule)]


def test_threads_of_workers_that_run_already_are_refused() -> None:
    config = load_config({"model": "scripted", "worker_addresses": "a:1", "num_threads": "2"}, {})
    with pytest.raises(ConfigurationError, match="give it to `maniple worker`"):
        resolve_auto(config, has_gpu=False, on_terminal=False)


@pytest.mark.parametrize("flag", [{"attention_backend": "torch"}, {"torch_compile": "on"}, {"tune_kernels": "on"}])
def test_what_workers_are_started_with_is_refused_for_those_that_run(flag: dict[str, str]) -> None:
    config = load_config({"model": "scripted", "worker_addresses": "a:1", **flag}, {})
    with pytest.raises(ConfigurationError, match="give it to `maniple worker`"):
        resolve_auto(config, has_gpu=False, on_terminal=False)


def test_sizes_of_graphs_are_read_by_commas() -> None:
    assert load_config({"model": "scripted", "cuda_graph_sizes": "8,1, 4"}, {}).cuda_graph_sizes == (8, 1, 4)
    with pytest.raises(ConfigurationError, match="must be whole numbers, by commas, such as 1,2,4"):
        load_config({"model": "scripted", "cuda_graph_sizes": "8;1"}, {})


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("cuda_graph_sizes", "1,,2"),
        ("device_ids", "0, ,1"),
        ("device_ids", ",1"),
        ("worker_addresses", "a:1,"),
        ("worker_addresses", "a:1;;b:1"),
        ("served_model_name", "one,"),
        ("auth_jwt_algorithms", ","),
    ],
)
def test_lists_with_an_empty_item_are_refused(field: str, text: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load_config({"model": "scripted", field: text}, {})
    (fault,) = caught.value.faults
    assert fault[:2] == (field, text)
    assert fault[2].startswith("must not have an empty item: two of ")


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ({"attention_backend": "xformers"}, "attention_backend='xformers': must be auto or one of cpu, flashinfer, "),
        ({"attention_backend": "triton"}, "attention_backend='triton': needs a CUDA device; the device of ranks is c"),
        ({"attention_backend": "cpu", "device": "cuda"}, "attention_backend='cpu': needs the CPU; the device of ranks"),
        ({"torch_compile": "on"}, "torch_compile=True: needs a GPU: on a CPU whole layers"),
        ({"tune_kernels": "on"}, "tune_kernels=True: needs a GPU: what is measured"),
    ],
)
@pytest.mark.parametrize("executor", ["uni", "mp"])
def test_kernels_that_cannot_be_where_ranks_are_started_are_refused(
    executor: str, flags: dict[str, str], told: str
) -> None:
    config = load_config({"model": "scripted", "executor": executor, **flags}, {})
    with pytest.raises(ConfigurationError, match=re.escape(told)):
        resolve_auto(config, has_gpu=False, on_terminal=False)
    if "cpu" not in flags.values() and "xformers" not in flags.values():
        resolve_auto(dataclasses.replace(config, model="demo"), has_gpu=True, on_terminal=False)


def test_rules_name_what_a_user_can_type() -> None:
    """A field's name with underscores is no flag."""
    fields = {one.name for one in dataclasses.fields(ControlPlaneConfig) if "_" in one.name}
    contradictions: list[dict[str, object]] = [
        {"num_kv_blocks": 64, "kv_cache_memory_bytes": 1 << 30},
        {"max_num_seqs": 65, "max_num_batched_tokens": 64},
        {"batch_invariant": True, "tensor_parallel_size": 2},
        {"worker_addresses": (("a:1",),), "data_parallel_size": 2},
        {"max_groups": 1},
        {"lease_s": 0.5},
    ]
    for values in contradictions:
        with pytest.raises(ConfigurationError) as caught:
            ControlPlaneConfig(**values)  # type: ignore[arg-type]
        for _, _, rule in caught.value.faults:
            assert "--" in rule
            assert not fields.intersection(re.findall(r"\w+", rule)), rule


def test_auto_is_resolved_with_a_gpu() -> None:
    after = resolve_auto(ControlPlaneConfig(), has_gpu=True, on_terminal=True)
    assert (after.device, after.max_num_seqs, after.max_num_batched_tokens) == ("cuda", 256, 2048)
    assert after.log_format == "console"


def test_model_directory_is_checked_before_anything_starts(tmp_path: Path) -> None:
    assert model_faults(str(tmp_path)) == [("model", str(tmp_path), "is a directory without config.json")]
    (tmp_path / "config.json").write_text("{}")
    assert model_faults(str(tmp_path)) == [("model", str(tmp_path), "is a directory without *.safetensors")]
    (tmp_path / "model.safetensors").touch()
    assert model_faults(str(tmp_path)) == []
    config = load_config({"model": str(tmp_path)}, {})
    assert resolve_auto(config, has_gpu=False, on_terminal=False).served_model_name == (tmp_path.name,)


@pytest.mark.parametrize("model", ["a/b/c", "white space", "../nowhere", "no.gguf", "owner/", "~/nowhere-at-all"])
def test_names_that_cannot_be_models_are_refused(model: str) -> None:
    assert [fault[0] for fault in model_faults(model)] == ["model"]


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights.bin"
    path.touch()
    assert model_faults(str(path)) == [("model", str(path), "is a file, but not a .gguf file")]


def test_number_of_groups_follows_from_addresses_or_size() -> None:
    def groups(**values: object) -> int:
        return ControlPlaneConfig(model="scripted", **values).num_groups  # type: ignore[arg-type]

    assert groups() == 1
    assert groups(data_parallel_size=3) == 3
    three = (("a:1",), ("b:1",), ("c:1",))
    assert groups(worker_addresses=three) == groups(worker_addresses=three, data_parallel_size=3) == 3
    assert groups(worker_addresses=three, max_groups=2) == 3  # it knows three, and owns two at a time
    with pytest.raises(ConfigurationError, match="needs --worker-addresses"):
        groups(data_parallel_size=2, max_groups=1)
    with pytest.raises(ConfigurationError, match="must be the number of groups in --worker-addresses, 3"):
        groups(worker_addresses=three, data_parallel_size=2)


def test_trace_and_recorded_deltas_are_two_files() -> None:
    ControlPlaneConfig(model="scripted", trace="a", record_deltas="b")
    with pytest.raises(ConfigurationError, match="trace='a': must be another file than --record-deltas"):
        ControlPlaneConfig(model="scripted", trace="a", record_deltas="a")  # each would destroy what the other wrote


TLS = {"tls_certificate": "c", "tls_key": "k"}
JWT = {"auth_jwks": "j", "auth_jwt_issuer": "i", "auth_jwt_audience": "a"}
RANK_TLS = {"rank_tls_ca": "a", "rank_tls_certificate": "c", "rank_tls_key": "k"}


@pytest.mark.parametrize(
    ("values", "fields"),
    [
        ({"tls_certificate": "c"}, ["tls_key"]),
        ({"tls_key": "k"}, ["tls_certificate"]),
        ({"tls_client_ca": "a"}, ["tls_client_ca"]),
        ({**TLS, "listen": "unix:/s"}, ["tls_certificate"]),
        ({"auth_jwks": "j"}, ["auth_jwt_issuer", "auth_jwt_audience"]),
        ({"auth_jwt_issuer": "i"}, ["auth_jwt_issuer"]),
        ({**JWT, "auth_jwt_algorithms": ("none",)}, ["auth_jwt_algorithms"]),
        ({**JWT, "auth_jwt_algorithms": ("RS256", "HS256")}, ["auth_jwt_algorithms"]),
        ({**JWT, "auth_jwt_algorithms": ()}, ["auth_jwt_algorithms"]),
        ({"max_requests_per_caller": 1}, ["max_requests_per_caller"]),
        ({"max_waiting_per_caller": 1}, ["max_waiting_per_caller"]),
        ({"admin_listen": "nowhere"}, ["admin_listen"]),
        ({"admin_listen": "0.0.0.0:50052"}, ["admin_listen"]),
        ({"admin_listen": "10.0.0.1:0", **TLS, "tls_client_ca": "a"}, ["admin_listen"]),
        ({"admin_listen": "127.0.0.1:50051"}, ["admin_listen"]),
        ({"admin_listen": "unix:/s", "probe_listen": "unix:/s"}, ["probe_listen"]),
        ({"rank_tls_ca": "a"}, ["rank_tls_certificate", "rank_tls_key"]),
        ({"rank_tls_server_name": "n"}, ["rank_tls_server_name"]),
        ({"relay_tls_server_name": "n"}, ["relay_tls_server_name"]),
    ],
)
def test_security_flags_that_lack_their_other_half_are_refused(values: dict[str, object], fields: list[str]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        ControlPlaneConfig(**values)  # type: ignore[arg-type]
    assert [field for field, _, _ in caught.value.faults] == fields


def test_security_flags_that_fit_together_are_fine() -> None:
    every = {**TLS, **JWT, **RANK_TLS, "tls_client_ca": "a", "auth_callers": "f", "max_requests_per_caller": 1}
    ControlPlaneConfig(**every, listen="0.0.0.0:50051", admin_listen="0.0.0.0:50052", probe_listen="[::]:50053")  # type: ignore[arg-type]
    ControlPlaneConfig(listen="0.0.0.0:50051", admin_listen="unix:/run/admin.sock")
    ControlPlaneConfig(admin_listen="127.0.0.1:0", probe_listen="127.0.0.1:0", listen="127.0.0.1:0")


@pytest.mark.parametrize("more", [RANK_TLS, {"allow_plaintext_workers": True}])
@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"worker_addresses": (("10.0.0.1:50061",),)}, "worker_addresses"),
        ({"worker_addresses": (("unix:/w", "dns:///workers:50061"),)}, "worker_addresses"),
        ({"worker_addresses": (("127.0.0.1:1",), ("127.0.0.2.nip.test:1",))}, "worker_addresses"),
        ({"executor": "ray"}, "executor"),
    ],
)
def test_prompts_go_to_workers_over_a_network_only_by_tls_or_where_plaintext_is_allowed(
    values: dict[str, object], field: str, more: dict[str, object]
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        resolve_auto(ControlPlaneConfig(model="scripted", **values), has_gpu=False, on_terminal=False)  # type: ignore[arg-type]
    assert [(name, "--allow-plaintext-workers" in rule) for name, _, rule in caught.value.faults] == [(field, True)]
    resolve_auto(ControlPlaneConfig(model="scripted", **values, **more), has_gpu=False, on_terminal=False)  # type: ignore[arg-type]
