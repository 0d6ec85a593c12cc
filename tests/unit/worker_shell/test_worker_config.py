from __future__ import annotations

import pytest

from service_chassis.errors import ConfigurationError
from worker_service.config import WorkerConfig, read_config


def test_flag_goes_over_environment_over_default() -> None:
    config = read_config(["--device", "cpu"], {"MANIPLE_DEVICE": "cuda", "MANIPLE_NUM_THREADS": "3"})
    assert (config.device, config.num_threads, config.log_level) == ("cpu", 3, WorkerConfig().log_level)


def test_all_faults_are_reported_at_once() -> None:
    arguments = "--rank 2 --world-size 2 --device tpu --num-threads many --listen nowhere --parent-fd 9999 --frobnicate"
    with pytest.raises(ConfigurationError) as caught:
        read_config(arguments.split(), {"MANIPLE_LOG_LEVEL": "loud"})
    by_field = {field: rule for field, _, rule in caught.value.faults}
    assert set(by_field) == {"rank", "device", "num_threads", "listen", "parent_fd", "--frobnicate", "log_level"}
    assert by_field["rank"] == "must be below world_size, which is 2"
    assert by_field["parent_fd"] == "must be an open file descriptor"


def test_both_servers_on_one_address_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="must differ from listen"):
        read_config(["--listen", "127.0.0.1:7000", "--health-listen", "127.0.0.1:7000"], {})
    read_config(["--listen", "127.0.0.1:0", "--health-listen", "127.0.0.1:0"], {})
