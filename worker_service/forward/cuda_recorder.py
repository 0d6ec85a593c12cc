"""Record by CUDA graphs, all in one pool of memory.

A recording is one graph, or several with host work between them. They are replayed in the order in which they were
recorded within a step and never side by side, so graphs of one pool may use the same memory, which is why the largest
are recorded first.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator

import torch

from worker_service.forward.recorder import Cut, Work


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """Free nothing by the way while a graph is recorded: a graph or an event among it would spoil it."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class CudaRecording:
    """Pieces of a step, in order: graphs, and what runs between them."""

    def __init__(self, graphs: list[torch.cuda.CUDAGraph], pieces: list[Work]) -> None:
        self._graphs = graphs  # alive as long as they may be replayed
        self._pieces = pieces

    def replay(self) -> None:
        for piece in self._pieces:
            piece()


class CudaRecorder:
    """See ``Recorder``. Device thread, which holds the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def record(self, work: Callable[[Cut], None]) -> CudaRecording:
        graphs: list[torch.cuda.CUDAGraph] = []
        pieces: list[Work] = []
        torch.cuda.synchronize(self._device)

        def begin() -> None:
            graph = torch.cuda.CUDAGraph()
            # Other threads of this process may use CUDA meanwhile; what this one calls is checked.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            graphs.append(graph)

        def end() -> None:
            graphs[-1].capture_end()
            pieces.append(graphs[-1].replay)

        def cut(between: Work) -> None:
            end()
            between()
            pieces.append(between)
            begin()

        present = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(present)
        with torch.cuda.stream(self._stream), _collector_paused():
            begin()
            try:
                work(cut)
            except BaseException:
                # The stream must not stay as it is; what went wrong is in the exception already.
                with contextlib.suppress(RuntimeError):
                    graphs[-1].capture_end()
                raise
            end()
        present.wait_stream(self._stream)
        return CudaRecording(graphs, pieces)

    def clear(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
