"""Record on the CPU what a device would record as graphs, and replay it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from worker_service.forward.recorder import Cut, Work

Call = tuple[Any, tuple[Any, ...], Mapping[str, Any], list[Tensor]]  # operation, arguments, results


class OpRecorder:
    """Records torch's operations with the memory of their arguments and results, as a CUDA graph does.

    Whatever the host decided is decided for good, whatever did not come by an operation of torch (kernels of numba) is
    lost, and a replay writes where the first run wrote.
    """

    def __init__(self) -> None:
        self.num_recorded = self.num_replayed = self.num_cuts = 0

    def record(self, work: Callable[[Cut], None]) -> _OpRecording:
        recording = _OpRecording(self)
        mode = _RecordingMode(recording.pieces)
        with mode:

            def cut(between: Work) -> None:
                mode.is_on = False
                between()
                recording.pieces.append(between)
                self.num_cuts += 1
                mode.is_on = True

            work(cut)
        self.num_recorded += 1
        return recording

    def clear(self) -> None:
        pass


class _OpRecording:
    def __init__(self, recorder: OpRecorder) -> None:
        self.pieces: list[Call | Work] = []
        self._recorder = recorder

    def replay(self) -> None:
        self._recorder.num_replayed += 1
        for piece in self.pieces:
            if callable(piece):
                piece()
                continue
            operation, arguments, keywords, results = piece
            fresh = operation(*arguments, **keywords)
            for target, source in zip(results, _tensors(fresh), strict=True):
                if target.data_ptr() != source.data_ptr():  # else a view, or written in place
                    target.copy_(source)


class _RecordingMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, pieces: list[Call | Work]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_on = True
        self._pieces = pieces

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        if self.is_on:
            self._pieces.append((operation, args, kwargs or {}, _tensors(result)))
        return result


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, torch.Tensor)]


class RerunRecorder:
    """Does the whole work again at each replay, with the host's decisions of the recording: for kernels of any kind."""

    def __init__(self) -> None:
        self.num_replayed = self.num_cuts = 0

    def record(self, work: Callable[[Cut], None]) -> _Rerun:
        work(self.cut)
        return _Rerun(self, work)

    def cut(self, between: Work) -> None:
        self.num_cuts += 1
        between()

    def clear(self) -> None:
        pass


class _Rerun:
    def __init__(self, recorder: RerunRecorder, work: Callable[[Cut], None]) -> None:
        self._recorder = recorder
        self._work = work

    def replay(self) -> None:
        self._recorder.num_replayed += 1
        self._work(self._recorder.cut)
