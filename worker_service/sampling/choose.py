"""Pick who samples: the host, or the device that has the logits."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from maniple_kernels.backend import fits_gpu_kernels
from worker_service.forward.launched_step import Outcome
from worker_service.sampling.logprobs import OutputLogprobs
from worker_service.sampling.sampler import KnownTokens, Sampler
from worker_service.step_work import Int32Array


class RowSampler(Protocol):
    """Samples one token for each of some rows of one batch."""

    def sample(self, logits: Tensor, rows: Int32Array, noting: OutputLogprobs | None = None) -> Int32Array:
        """See ``Sampler.sample``."""

    def warm_up(self, logits: Tensor) -> None:
        """Run once what is compiled at its first use. ``logits`` may be changed, nothing else is."""


@runtime_checkable
class LaunchingSampler(RowSampler, Protocol):
    """One that need not wait for what it samples."""

    latest: Tensor  # [max_num_seqs] int32, on the device: what each row sampled last

    def launch(self, logits: Tensor, rows: Int32Array) -> Outcome:
        """As ``sample``, without waiting for the outcome."""


def choose_sampler(batch: KnownTokens, device: torch.device) -> RowSampler:
    """Return the sampler for logits on ``device``."""
    if not fits_gpu_kernels(torch.empty(0, device=device)):
        return Sampler(batch)
    from worker_service.sampling.device_sampler import DeviceSampler

    return DeviceSampler(batch, device)
