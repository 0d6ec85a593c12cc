from __future__ import annotations

import pytest

from control_plane.config import ControlPlaneConfig
from control_plane.executors.worker_settings import WorkerSettings
from service_chassis.errors import ConfigurationError, InvalidParameter
from service_chassis.ids import Rank
from service_chassis.settings import settings_of
from worker_service.config import WorkerConfig, command_line, read_config
from worker_service.runners import make_runner
from worker_service.supervisor import rank_config

PLAINTEXT = {"MANIPLE_WORKER_ALLOW_PLAINTEXT_LISTEN": "on"}


def test_flag_goes_over_environment_over_default() -> None:
    config = read_config(["--device", "cpu"], {"MANIPLE_WORKER_DEVICE": "cuda", "MANIPLE_WORKER_NUM_THREADS": "3"})
    assert (config.device, config.num_threads, config.log_level) == ("cpu", 3, WorkerConfig().log_level)


def test_variables_are_none_of_a_control_planes() -> None:
    assert read_config([], {"MANIPLE_LISTEN": "10.0.0.1:1", "MANIPLE_DEVICE": "cuda"}) == read_config([], {})
    assert read_config([], {"MANIPLE_WORKER_LISTEN": "127.0.0.2:1"}).listen == "127.0.0.2:1"
    ours = {made.variable for made in settings_of(WorkerConfig).values()}
    assert not ours & {made.variable for made in settings_of(ControlPlaneConfig).values()}


def test_help_has_topics_defaults_and_variables_and_no_flag_that_only_programs_use(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        read_config(["--help"], {})
    shown = " ".join(capsys.readouterr().out.split())
    assert ended.value.code == 0
    assert shown.startswith("usage: maniple worker [FLAGS]")
    for part in ("addresses:", "ranks:", "Examples:", "(default 127.0.0.1:50061) [MANIPLE_WORKER_LISTEN]"):
        assert part in shown
    assert "-fd" not in shown
    assert "(default )" not in shown
    for made in settings_of(WorkerConfig).values():
        assert (f"{made.flag} " in shown or f"{made.flag}," in shown) is not made.is_internal


def test_descriptors_are_not_read_from_the_environment() -> None:
    assert read_config([], {"MANIPLE_WORKER_PARENT_FD": "9999"}).parent_fd is None


def test_all_faults_are_reported_at_once() -> None:
    arguments = "--rank 2 --world-size 2 --device tpu --num-threads many --listen nowhere --parent-fd 9999 --frobnicate"
    with pytest.raises(ConfigurationError) as caught:
        read_config(arguments.split(), {"MANIPLE_WORKER_LOG_LEVEL": "loud"})
    by_field = {field: rule for field, _, rule in caught.value.faults}
    assert set(by_field) == {"rank", "device", "num_threads", "listen", "parent_fd", "--frobnicate", "log_level"}
    assert by_field["rank"] == "must be below --world-size, which is 2"
    assert by_field["parent_fd"] == "must be an open file descriptor"


def test_both_servers_on_one_address_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="must differ from --listen"):
        read_config(["--listen", "127.0.0.1:7000", "--health-listen", "127.0.0.1:7000"], {})
    read_config(["--listen", "127.0.0.1:0", "--health-listen", "127.0.0.1:0"], {})


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", ("127.0.0.1:50061", "127.0.0.1:50062", 0, 1)),
        ("--listen 0.0.0.0:0", ("0.0.0.0:0", "0.0.0.0:0", 0, 1)),
        ("--listen unix:/run/w.sock", ("unix:/run/w.sock", "unix:/run/w.sock-health", 0, 1)),
        ("--listen [::]:7 --tensor-parallel-size 4", ("[::]:7", "[::]:11", 0, 4)),
        ("--listen a:7 --health-listen a:90 --tensor-parallel-size 4", ("a:7", "a:90", 0, 4)),
        ("--tensor-parallel-size 4 --rank 4 --world-size 8", ("127.0.0.1:50061", "127.0.0.1:50065", 4, 8)),
        ("--tensor-parallel-size 4 --node-rank 1 --world-size 8", ("127.0.0.1:50061", "127.0.0.1:50065", 4, 8)),
        ("--tensor-parallel-size 2 --listen a:65532", ("a:65532", "a:65534", 0, 2)),
        ("--listen a:65535 --health-listen b:65535", ("a:65535", "b:65535", 0, 1)),
        ("--tensor-parallel-size 3 --listen a:9 --health-listen b:9", ("a:9", "b:9", 0, 3)),
    ],
)
def test_what_follows_from_other_values_is_filled_in(words: str, expected: tuple[str, str, int, int]) -> None:
    config = read_config(words.split(), PLAINTEXT)
    assert (config.listen, config.health_listen, config.rank, config.world_size) == expected


@pytest.mark.parametrize(
    ("words", "field", "rule"),
    [
        ("--tensor-parallel-size 2 --listen unix:/w", "listen", "for several ranks"),
        ("--tensor-parallel-size 2 --listen a:0", "listen", "for several ranks"),
        ("--tensor-parallel-size 2 --world-size 1", "rank", "with 1 more behind it, must be below --world-size"),
        ("--tensor-parallel-size 4 --world-size 6 --rank 4", "rank", "with 3 more behind it"),
        ("--tensor-parallel-size 4 --world-size 8 --node-rank 2", "rank", "with 3 more behind it"),
        ("--world-size 8 --rank 1 --node-rank 2", "node_rank", "must not be given beside --rank, which is 1"),
        ("--tensor-parallel-size 0", "tensor_parallel_size", "must be in [1, 1024]"),
        ("--tensor-parallel-size 2 --listen a:65535", "listen", "must have a port up to 65532: servers and their"),
        ("--tensor-parallel-size 2 --listen a:65533", "listen", "health servers of 2 ranks take the next ones"),
        ("--listen a:65535", "listen", "must have a port up to 65534: servers and their health servers of one rank"),
        ("--tensor-parallel-size 3 --listen a:65534 --health-listen a:9", "listen", "must have a port up to 65533"),
        ("--tensor-parallel-size 3 --health-listen a:65534", "health_listen", "must have a port up to 65533"),
        ("--tensor-parallel-size 3 --listen a:7 --health-listen a:9", "health_listen", "must be 3 ports or more from"),
        ("--tensor-parallel-size 3 --listen a:9 --health-listen a:7", "health_listen", "must be 3 ports or more from"),
    ],
)
def test_ranks_that_do_not_fit_are_refused(words: str, field: str, rule: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        read_config(words.split(), PLAINTEXT)
    assert [fault[2] for fault in caught.value.faults if fault[0] == field and rule in fault[2]]


TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}


def test_torchrun_says_which_rank_and_the_port_follows_from_the_place_on_the_machine() -> None:
    config = read_config(["--listen", "0.0.0.0:7000"], TORCHRUN | PLAINTEXT)
    assert (config.rank, config.world_size) == (5, 8)
    assert (config.listen, config.health_listen) == ("0.0.0.0:7001", "0.0.0.0:7005")


def test_torchrun_comes_before_defaults_and_after_everything_else() -> None:
    config = read_config(["--world-size", "16"], TORCHRUN | {"MANIPLE_WORKER_RANK": "9"})
    assert (config.rank, config.world_size) == (9, 16)
    with pytest.raises(ConfigurationError, match="torchrun, which starts a process for every rank"):
        read_config(["--tensor-parallel-size", "2"], TORCHRUN)
    with pytest.raises(ConfigurationError, match="must not be given beside torchrun, which names every rank"):
        read_config(["--node-rank", "1"], TORCHRUN)
    with pytest.raises(ConfigurationError, match="WORLD_SIZE='many': must be a whole number"):
        read_config([], TORCHRUN | {"WORLD_SIZE": "many"})
    # The same names mean nothing without it: other launchers and shells use them too.
    assert read_config([], {"RANK": "5", "WORLD_SIZE": "8"}).rank == 0


def test_each_rank_gets_the_device_that_is_named_for_it() -> None:
    config = read_config(["--listen", "127.0.0.1:7", "--tensor-parallel-size", "3", "--device-ids", "5,0,3"], {})
    assert [rank_config(config, index).device_ids for index in range(3)] == [(5,), (0,), (3,)]
    one = rank_config(config, 2)
    assert read_config(command_line(one), {}) == one
    # Under torchrun the process is one of several that were given the same flags.
    launched = read_config(["--device-ids", "5,0,3,1", "--listen", "127.0.0.1:7"], TORCHRUN)
    assert launched.device_ids == ((5, 0, 3, 1)[int(TORCHRUN["LOCAL_RANK"])],)


@pytest.mark.parametrize(
    ("ids", "rule"),
    [
        ("0,2", "2 for one rank"),
        ("7,7", "must differ"),
        ("x", "must be whole numbers"),
        ("0,,1", "must not have an empty item"),
        ("-1", r"must each be in \[0, 1023\]"),
    ],
)
def test_devices_that_fit_no_rank_are_refused(ids: str, rule: str) -> None:
    with pytest.raises(ConfigurationError, match=rule):
        read_config(["--device-ids", ids], {})


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--attention-backend xformers", "must be auto or one of cpu, flashinfer, torch, triton, or an entry point of"),
        ("--attention-backend triton --device cpu", "needs a CUDA device; the device of ranks is cpu"),
        ("--tune-kernels --device cpu", "tune_kernels=True: needs a GPU"),
        ("--torch-compile --device cpu", "torch_compile=True: needs a GPU"),
    ],
)
def test_kernels_that_cannot_be_on_the_device_are_refused(words: str, told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        read_config(words.split(), {})
    # What the device is, is seen when a model loads; the scripted one computes on the CPU.
    if "--device" in words:
        config = read_config(words.replace("--device cpu", "").split(), {})
        with pytest.raises(InvalidParameter, match=told):
            make_runner("scripted", config)


def test_ranks_with_one_environment_have_probes_and_metrics_on_ports_of_their_own() -> None:
    environment = {"MANIPLE_WORKER_METRICS_LISTEN": "127.0.0.1:9100", "MANIPLE_WORKER_PROBE_LISTEN": "127.0.0.1:9200"}
    ports = []
    for settings in (WorkerSettings(first_device=0), WorkerSettings(first_device=2)):  # of two groups
        for rank in (Rank(0), Rank(1)):
            words = settings.arguments(rank, 2, listen="unix:/w", health_listen="unix:/h", orphan_grace_s=0)
            config = read_config(words[2:], environment)
            assert read_config(command_line(config), environment) == config
            ports.append((config.metrics_listen, config.probe_listen))
    assert ports == [(f"127.0.0.1:{9100 + index}", f"127.0.0.1:{9200 + index}") for index in range(4)]


def test_command_line_gives_the_same_configuration_to_another_process() -> None:
    config = read_config(
        ["--listen", "a:7", "--device", "cpu", "--tensor-parallel-size", "3", "--allow-insecure-serialization"],
        PLAINTEXT | {"MANIPLE_WORKER_PROBE_LISTEN": "a:99"},
    )
    assert config.allow_insecure_serialization
    one = rank_config(config, 2)
    assert (one.rank, one.listen, one.health_listen, one.tensor_parallel_size) == (2, "a:9", "a:12", 1)
    assert read_config(command_line(one), {}) == one


TLS = "--tls-certificate c --tls-key k --tls-client-ca a"


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        ("--listen 0.0.0.0:7", ["listen"]),
        ("--listen [::]:7", ["listen"]),
        ("--listen 10.0.0.1:0", ["listen"]),
        ("--listen worker-0.workers:7", ["listen"]),
        ("--health-listen 0.0.0.0:7", ["health_listen"]),
        ("--listen 0.0.0.0:7 --health-listen 0.0.0.0:9", ["listen", "health_listen"]),
        ("--listen 0.0.0.0:7 --tls-certificate c", ["tls_key", "tls_client_ca"]),
        ("--tls-certificate c --tls-key k", ["tls_client_ca"]),
        ("--tls-client-ca a", ["tls_certificate", "tls_key"]),
        ("--tls-client-names n", ["tls_client_names"]),
        ("--probe-listen nowhere", ["probe_listen"]),
        ("--listen 127.0.0.1:7 --probe-listen 0.0.0.0:7", ["probe_listen"]),
        ("--listen 127.0.0.1:7 --probe-listen 0.0.0.0:8", ["probe_listen"]),
        ("--tensor-parallel-size 2 --listen 127.0.0.1:7 --probe-listen a:65535", ["probe_listen"]),
        ("--tensor-parallel-size 2 --probe-listen a:0", ["probe_listen"]),
        ("--listen unix:/w --probe-listen unix:/w-health", ["probe_listen"]),
    ],
)
def test_what_others_could_reach_in_plaintext_is_refused(words: str, fields: list[str]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        read_config(words.split(), {})
    assert [field for field, _, _ in caught.value.faults] == fields


@pytest.mark.parametrize(
    "words",
    [
        "--listen unix:/w",
        "--listen [::1]:7",
        "--listen localhost:7 --probe-listen 0.0.0.0:99",
        f"--listen 0.0.0.0:7 {TLS} --tls-client-names a,b",
        "--listen 0.0.0.0:7 --allow-plaintext-listen",
    ],
)
def test_what_only_this_machine_or_the_right_certificate_reaches_is_fine(words: str) -> None:
    config = read_config(words.split(), {})
    assert read_config(command_line(config), {}) == config
