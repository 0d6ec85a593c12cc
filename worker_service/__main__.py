"""Start one rank, ``python -m worker_service --listen unix:/path --rank 0``, or all of a container."""

from __future__ import annotations

import asyncio
import faulthandler
import os
import sys

from service_chassis.errors import ConfigurationError
from service_chassis.flags import fault_lines
from service_chassis.telemetry import configure_logging
from worker_service.config import WorkerConfig, read_config
from worker_service.server import exit_now, run_worker
from worker_service.supervisor import supervise

_WRONG_CONFIGURATION = 2
# How long a thread that wants to go on waits at most for the one that runs Python. At Python's 5 ms a device that is
# done with a step waits until the event loop has nothing to do, up to half a millisecond of the 12 that a step takes.
_SWITCH_S = 1e-4


def main() -> None:
    """Read the configuration, serve, exit."""
    try:
        config = read_config(sys.argv[1:], os.environ)
        faulthandler.enable()
        sys.setswitchinterval(_SWITCH_S)
        if config.tensor_parallel_size > 1:
            configure_logging(*config.logging())
            sys.exit(asyncio.run(supervise(config)))
        configure_logging(*config.logging(), rank=config.rank)
        code = asyncio.run(run_worker(config))
    except ConfigurationError as error:
        print("maniple worker: nothing was started, because of", file=sys.stderr)
        print("\n".join(fault_lines(error.faults, WorkerConfig)), file=sys.stderr)
        sys.exit(_WRONG_CONFIGURATION)
    exit_now(code)


if __name__ == "__main__":
    main()
