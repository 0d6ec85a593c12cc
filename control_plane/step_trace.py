"""What a trace shows of the steps of one group: the control plane's work on each, and the ranks'.

Tracks: "control plane" with a row for each group (schedule, send, result, publish) and a bar for each step in flight;
a process for each rank with the row "device" (a step, in it execute and sample) and a bar while a step is queued. An
arrow leads from the send of a step to the device of each rank that takes it up. See docs/tracing.md.
"""

from __future__ import annotations

from collections.abc import Sequence

from control_plane.group.rank_clock import StepTiming
from control_plane.trace_file import TraceFile
from service_chassis.ids import Rank

_CONTROL_PLANE = 1  # pid; 0 means an idle processor to viewers
_DEVICE = 1  # tid
_RANKS_OF_A_GROUP = 10_000


class GroupTrace:
    """The part of one group in a trace. Event loop."""

    def __init__(self, file: TraceFile, group: int) -> None:
        """Name the group's row."""
        self._file = file
        self._group = group
        self._row = group + 1  # tid, on the control plane
        self._named: set[Rank] = set()
        self._name(_CONTROL_PLANE, None, "control plane")
        self._name(_CONTROL_PLANE, self._row, f"group {group}")

    def work(self, name: str, began_ns: int, ended_ns: int, steps: Sequence[int], **facts: int) -> None:
        """Show a piece of the control plane's work on some steps."""
        self._slice(name, _CONTROL_PLANE, self._row, began_ns, ended_ns, {"steps": list(steps), **facts})

    def sent(self, step: int, at_ns: int, *, num_tokens: int, num_rows: int) -> None:
        """Show that a step is on its way to the ranks; ``at_ns`` lies within its work "send"."""
        args = {"step": step, "tokens": num_tokens, "rows": num_rows}
        self._bar("b", f"step {step}", self._id(step), _CONTROL_PLANE, at_ns, args)

    def answered(self, step: int, at_ns: int) -> None:
        """Show that its result came."""
        self._bar("e", f"step {step}", self._id(step), _CONTROL_PLANE, at_ns, {})

    def launched(self, step: int, at_ns: int) -> None:
        """Begin the arrow to the ranks, within the work "send"."""
        self._flow("s", step, _CONTROL_PLANE, self._row, at_ns)

    def rank_timed(self, rank: Rank, timing: StepTiming) -> None:
        """Show what a rank did for a step."""
        pid, step = _RANKS_OF_A_GROUP * (self._group + 1) + rank, timing.step
        if rank not in self._named:
            self._named.add(rank)
            self._name(pid, None, f"group {self._group}, rank {rank}")
            self._name(pid, _DEVICE, "device")
        number = f"{self._id(step)}/{rank}"
        self._bar("b", "queue", number, pid, timing.accepted_ns, {"step": step})
        self._bar("e", "queue", number, pid, timing.started_ns, {})
        args: dict[str, object] = {"step": step}
        self._slice(f"step {step}", pid, _DEVICE, timing.started_ns, timing.completed_ns, args)
        sampling_ns = timing.sampling_ns or timing.completed_ns
        self._slice("execute", pid, _DEVICE, timing.started_ns, sampling_ns, args)
        if timing.sampling_ns:
            self._slice("sample", pid, _DEVICE, sampling_ns, timing.completed_ns, args)
        self._flow("f", step, pid, _DEVICE, timing.started_ns)

    def _id(self, step: int) -> str:
        return f"{self._group}/{step}"

    def _us(self, at_ns: int) -> float:
        return (at_ns - self._file.began_ns) / 1000

    def _name(self, pid: int, tid: int | None, name: str) -> None:
        kind = "process_name" if tid is None else "thread_name"
        self._file.put({"ph": "M", "name": kind, "pid": pid, "tid": tid or 0, "args": {"name": name}})

    def _slice(self, name: str, pid: int, tid: int, began_ns: int, ended_ns: int, args: dict[str, object]) -> None:
        ts, dur = self._us(began_ns), (ended_ns - began_ns) / 1000
        self._file.put({"ph": "X", "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": args})

    def _bar(self, phase: str, name: str, number: str, pid: int, at_ns: int, args: dict[str, int]) -> None:
        event = {"ph": phase, "cat": "step", "name": name, "id": number, "pid": pid, "tid": 0, "ts": self._us(at_ns)}
        self._file.put({**event, "args": args})

    def _flow(self, phase: str, step: int, pid: int, tid: int, at_ns: int) -> None:
        event = {"ph": phase, "cat": "step", "name": "step", "id": self._id(step), "pid": pid, "tid": tid}
        bound = {"bp": "e"} if phase == "f" else {}
        self._file.put({**event, **bound, "ts": self._us(at_ns)})
