"""Pick what computes. Imports are late: the scripted model must start in a second, on a machine without torch."""

from __future__ import annotations

from service_chassis.errors import InvalidParameter
from service_chassis.kernel_rules import AUTO
from service_chassis.scripted import parse_scripted
from worker_service.config import WorkerConfig, kernel_faults_of
from worker_service.platforms.openmp import bound_spinning
from worker_service.runner import ModelRunner


def make_runner(model: str, config: WorkerConfig) -> ModelRunner:
    """Return the runner for ``model``, with nothing loaded.

    Raises:
        InvalidParameter: torch is missing, or this rank's flags ask of its device what that cannot do.
    """
    options = parse_scripted(model)
    if options is not None:
        device = config.device if config.device != AUTO else "cpu"  # on which that model computes
        for fault in kernel_faults_of(config, device):
            raise InvalidParameter(*fault)
        from worker_service.scripted import ScriptedRunner

        return ScriptedRunner(options, rank=config.rank, may_sleep=config.enable_sleep_mode)
    bound_spinning()
    try:
        import torch  # noqa: F401
    except ImportError:
        rule = "needs torch: install maniple[worker], or use the scripted model"
        raise InvalidParameter("model", model, rule) from None
    from worker_service.forward.assemble import ForwardOptions
    from worker_service.forward.compile_rule import INDUCTOR
    from worker_service.model_runner import TorchModelRunner
    from worker_service.sleep.choose import SleepOptions

    return TorchModelRunner(
        device=config.device,
        rank=config.rank,
        world_size=config.world_size,
        first_device=config.first_device,
        device_id=config.device_ids[0] if config.device_ids else None,
        num_threads=config.num_threads,
        num_groups_sharing=config.num_groups_sharing,
        forward=ForwardOptions(
            attention_backend=config.attention_backend,
            compiler=INDUCTOR if config.torch_compile else "",
            tune_kernels=config.tune_kernels,
        ),
        sleep=SleepOptions(config.sleep_backend, config.sleep_directory) if config.enable_sleep_mode else None,
    )
