"""Exchange tensors between the ranks of a group.

On CUDA devices all of it is NCCL's. On the CPU large sums are Gloo's, and what is small goes over the group's own
sockets to rank 0 and back: to wake the threads of Gloo's ring, step after step, takes far longer than to send so
little. Formed when a model is loaded, and again for each new formation. On one rank everything here is nothing. Results
are the same to the bit on every rank.
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

from service_chassis.telemetry import get_logger
from worker_service.nccl import NO_TIMEOUT, AllReduce, choose_all_reduce, form_nccl
from worker_service.process_group import OUTPUT_RANK, BrokenCollective, Bytes, LoneProcessGroup, ProcessGroup

_CONNECT_TIMEOUT = datetime.timedelta(seconds=60)
# Sums up to here go over the sockets. Three ranks on two busy cores, sockets / Gloo in ms: 2 KB 0.06 / 2.5, 18 KB
# 0.12 / 4.7, 147 KB 0.5 / 6.6, 1.2 MB 2.3 / 4.8.
_SMALL_BYTES = 1 << 20


class TensorGroup:
    """The collectives of a model's layers. Used by the device thread alone, except ``abort``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._group: ProcessGroup = LoneProcessGroup("")
        self._backend: Any = None  # None: one rank
        self._device_sum: AllReduce | None = None  # of devices that have their own way to add up
        self._aborted = False
        self._reducing = dist.AllreduceOptions()
        self._gathering = dist.GatherOptions()
        self._reducing.timeout = self._gathering.timeout = NO_TIMEOUT
        self._gathering.rootRank = OUTPUT_RANK
        self._gathering.asyncOp = device.type != "cuda"  # there on the stream that computes, without a wait

    def join(self, group: ProcessGroup) -> None:
        """Connect to the other ranks of a newly formed group; all of them do the same now."""
        self.abort()
        self._group, self._backend, self._device_sum, self._aborted = group, None, None, False
        if group.world_size == 1:
            return
        store, way = form_store(group), "gloo"
        if self._device.type == "cuda":
            self._backend = form_nccl(store, group, self._device)
            way, self._device_sum = choose_all_reduce(self._backend, group)
        else:
            self._backend = _form_gloo(store, group)
        group.on_abort(self.abort)
        get_logger().info("tensor_group.formed", formation_id=group.formation_id, all_reduce=way)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Add up ``x`` over the ranks, in place, and return it. Raises ``BrokenCollective``."""
        if self._backend is None:
            return x
        if self._device.type == "cpu" and x.nbytes <= _SMALL_BYTES and x.is_contiguous():
            return self._all_reduce_small(x)
        if self._device_sum is not None:
            self.check()
            self._device_sum(x)
            return x
        self._wait(self._backend.allreduce, [x], self._reducing)
        return x

    def _all_reduce_small(self, x: Tensor) -> Tensor:
        parts = self._group.gather(_bytes_of(x))
        if parts is None:
            return x.copy_(_tensor_of(self._group.broadcast(b""), x))
        total = x.float()
        for part in parts[1:]:
            total += _tensor_of(part, x)
        x.copy_(total)
        self._group.broadcast(_bytes_of(x))
        return x

    def gather(self, x: Tensor) -> list[Tensor] | None:
        """Return every rank's ``x``, of one shape, on rank 0; None elsewhere. Raises ``BrokenCollective``."""
        if self._backend is None:
            return [x]
        if self._device.type == "cpu":
            gathered = self._group.gather(_bytes_of(x.contiguous()))
            return None if gathered is None else [_tensor_of(part, x) for part in gathered]
        is_output = self._group.rank == OUTPUT_RANK
        parts = [torch.empty_like(x) for _ in range(self._group.world_size)] if is_output else []
        self._wait(self._backend.gather, [parts] if is_output else [], [x], self._gathering)
        return parts if is_output else None

    def check(self) -> None:
        """Raise ``BrokenCollective`` once the group was aborted.

        Collectives of a device say nothing when they end so: what they wrote is no sum. Whoever has waited for the
        device asks this before the outcome is used.
        """
        if self._aborted:
            raise BrokenCollective("the group was aborted")

    @staticmethod
    def _wait(collective: Any, *arguments: Any) -> None:
        try:
            work = collective(*arguments)
            if work is not None:  # else it is in the order of the stream that computes
                work.wait()
        except RuntimeError as error:
            # Without the place in the library's source, and its advice.
            text = str(error).split("] ", 1)[-1].split(". This is typically", 1)[0]
            raise BrokenCollective(f"{collective.__name__}: {text}") from error

    def abort(self) -> None:
        """Break NCCL's collectives. Any thread, does not wait.

        Gloo's cannot be broken from outside: they end when the other ranks do, and the timer of ``server`` ends this
        process whatever it waits for. The group's sockets are broken by the group.
        """
        backend = self._backend
        if backend is not None and self._device.type == "cuda":
            self._aborted = True
            threading.Thread(target=backend.abort, name="nccl-abort", daemon=True).start()


def _bytes_of(x: Tensor) -> memoryview:
    return memoryview(x.view(torch.uint8).reshape(-1).numpy().data)


def _tensor_of(content: Bytes, like: Tensor) -> Tensor:
    return torch.frombuffer(content, dtype=like.dtype).view(like.shape)


def form_store(group: ProcessGroup) -> c10d.Store:
    """Open the store through which the library's connections find each other, under the formation's name."""
    listener = None
    if group.rank == OUTPUT_RANK:
        family = socket.AF_INET6 if ":" in group.host else socket.AF_INET
        listener = socket.create_server((group.host, 0), family=family, backlog=group.world_size)
    port = listener.getsockname()[1] if listener is not None else 0
    host, port_text = bytes(group.broadcast(f"{group.host} {port}".encode())).decode().split()
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
    return gloo(store, group.rank, group.world_size, options)
