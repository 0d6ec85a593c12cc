"""Exchange tensors between the ranks of a group: Gloo on the CPU, NCCL on CUDA devices.

Formed over the group's sockets when a model is loaded, and again for each new formation. On one rank everything here is
nothing. Results are the same to the bit on every rank.
"""

from __future__ import annotations

import datetime
import socket
import threading
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from service_chassis.errors import InvalidParameter
from service_chassis.telemetry import get_logger
from worker_service.process_group import OUTPUT_RANK, BrokenCollective, ProcessGroup

_CONNECT_TIMEOUT = datetime.timedelta(seconds=60)
# Ranks judge nobody: a rank may wait in a collective for a step that a new owner has yet to relay (PROTOCOL C4).
_NO_TIMEOUT = datetime.timedelta(days=3650)


class TensorGroup:
    """The collectives of a model's layers. Used by the device thread alone, except ``abort``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._world_size = 1
        self._rank = OUTPUT_RANK
        self._backend: Any = None  # None: one rank
        self._reducing = dist.AllreduceOptions()
        self._gathering = dist.GatherOptions()
        self._reducing.timeout = self._gathering.timeout = _NO_TIMEOUT
        self._gathering.rootRank = OUTPUT_RANK

    def join(self, group: ProcessGroup) -> None:
        """Connect to the other ranks of a newly formed group; all of them do the same now."""
        self.abort()
        self._rank, self._world_size, self._backend = group.rank, group.world_size, None
        if group.world_size == 1:
            return
        store = _form_store(group)
        if self._device.type == "cuda":
            self._backend = _form_nccl(store, group)
        else:
            self._backend = _form_gloo(store, group)
        group.on_abort(self.abort)
        get_logger().info("tensor_group.formed", formation_id=group.formation_id, backend=self._backend.name())

    def all_reduce(self, x: Tensor) -> Tensor:
        """Add up ``x`` over the ranks, in place, and return it. Raises ``BrokenCollective``."""
        if self._world_size > 1:
            self._wait(self._backend.allreduce, [x], self._reducing)
        return x

    def gather(self, x: Tensor) -> list[Tensor] | None:
        """Return every rank's ``x``, of one shape, on rank 0; None elsewhere. Raises ``BrokenCollective``."""
        if self._world_size == 1:
            return [x]
        parts = [torch.empty_like(x) for _ in range(self._world_size)] if self._rank == OUTPUT_RANK else None
        self._wait(self._backend.gather, [parts] if parts is not None else [], [x], self._gathering)
        return parts

    @staticmethod
    def _wait(collective: Any, *arguments: Any) -> None:
        try:
            collective(*arguments).wait()
        except RuntimeError as error:
            # Without the place in the library's source, and its advice.
            text = str(error).split("] ", 1)[-1].split(". This is typically", 1)[0]
            raise BrokenCollective(f"{collective.__name__}: {text}") from error

    def abort(self) -> None:
        """Break NCCL's collectives. Any thread, does not wait.

        Gloo's cannot be broken from outside: they end when the other ranks do, and the timer of ``server`` ends this
        process whatever it waits for.
        """
        backend = self._backend
        if backend is not None and self._device.type == "cuda":
            threading.Thread(target=backend.abort, name="nccl-abort", daemon=True).start()


def _form_store(group: ProcessGroup) -> c10d.Store:
    """Open the store through which the library's connections find each other, under the formation's name."""
    listener = None
    if group.rank == OUTPUT_RANK:
        family = socket.AF_INET6 if ":" in group.host else socket.AF_INET
        listener = socket.create_server((group.host, 0), family=family, backlog=group.world_size)
    port = listener.getsockname()[1] if listener is not None else 0
    host, port_text = group.broadcast(f"{group.host} {port}".encode()).decode().split()
    store = c10d.TCPStore(
        host,
        int(port_text),
        is_master=listener is not None,
        wait_for_workers=False,
        timeout=_CONNECT_TIMEOUT,
        master_listen_fd=listener.detach() if listener is not None else None,
    )
    return c10d.PrefixStore(f"maniple/{group.formation_id}", store)


def _form_gloo(store: c10d.Store, group: ProcessGroup) -> Any:
    gloo: Any = dist.ProcessGroupGloo  # its annotations lack half of it
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=group.host)]
    options._timeout = _CONNECT_TIMEOUT
    options._threads = 1
    return gloo(store, group.rank, group.world_size, options)


def _form_nccl(store: c10d.Store, group: ProcessGroup) -> Any:
    if not dist.is_nccl_available():
        raise InvalidParameter("device", "cuda", "must be used on one rank: this torch has no NCCL")
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = _NO_TIMEOUT
    return nccl(store, group.rank, group.world_size, options)
