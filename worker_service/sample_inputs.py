"""Bring together the steps whose sampling waits and what they wait for (PROTOCOL B6).

A delta says which rows wait; the ``SampleInput`` of its step says what each may sample, or that their masks died with
their owner. It comes while the forward runs, or before the delta where deltas have a way of their own. Of several for
one step the first counts. Only the output rank samples, so only there anybody waits.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np

from maniple.v1.scheduler_delta_pb2 import SampleInput
from service_chassis.errors import DeltaRefused
from worker_service.heartbeat import Vitals
from worker_service.step_work import Bits

# An input may be for a step that was not accepted yet, but not for one that cannot be outstanding.
_MAX_AHEAD = 64


class SampleGate:
    """What one step waits for. Filled by the event loop, awaited by the device thread."""

    def __init__(self, rows: tuple[int, ...], vitals: Vitals) -> None:
        self.rows = rows
        self._vitals = vitals
        self._is_open = threading.Event()
        self._masks: Mapping[int, Bits] | None = None

    @property
    def is_open(self) -> bool:
        """Whether there is nothing more to wait for."""
        return self._is_open.is_set()

    def open(self, masks: Mapping[int, Bits] | None) -> None:
        """Let the step go on, with a mask for each row or, with None, without a sample for any."""
        self._masks = masks
        self._is_open.set()

    def wait(self) -> Mapping[int, Bits] | None:
        """Wait for as long as it takes; return req_index -> mask, or None where the masks are void.

        The owner is what is waited for, so the clock of the step stands still: being slow is not this rank's.
        """
        if not self._is_open.is_set():
            with _standing_clock(self._vitals):
                self._is_open.wait()
        return self._masks


@contextmanager
def _standing_clock(vitals: Vitals) -> Iterator[None]:
    vitals.hold_clock()
    try:
        yield
    finally:
        vitals.release_clock()


class SampleInputs:
    """The gates of the steps that are queued or run. Event loop."""

    def __init__(self, vitals: Vitals, vocab_size: int) -> None:
        self._vitals = vitals
        self._row_bytes = 4 * -(-vocab_size // 32)
        self._gates: dict[int, SampleGate] = {}  # step -> until it is completed
        self._early: dict[int, SampleInput] = {}  # of steps that were not accepted yet

    def gate(self, step: int, rows: tuple[int, ...]) -> SampleGate:
        """Return the gate of an accepted step. Raises ``DeltaRefused`` if its input came already and is wrong."""
        gate = self._gates[step] = SampleGate(rows, self._vitals)
        early = self._early.pop(step, None)
        if early is not None:
            self._fill(gate, early)
        return gate

    def take(self, sample_input: SampleInput, *, accepted: int) -> None:
        """Take an input of the present owner. One that is late, or not the first, is dropped.

        Raises:
            DeltaRefused: it does not fit the step.
        """
        step = sample_input.step
        gate = self._gates.get(step)
        if gate is not None and not gate.is_open:
            self._fill(gate, sample_input)
        elif accepted < step <= accepted + _MAX_AHEAD:
            self._early.setdefault(step, sample_input)

    def _fill(self, gate: SampleGate, sample_input: SampleInput) -> None:
        rows, raw = tuple(sample_input.req_indices), sample_input.mask_bits
        where = f"step {sample_input.step}: sample_input"
        if rows != gate.rows:
            raise DeltaRefused(f"{where}.req_indices={list(rows)}: must be the rows that wait, {list(gate.rows)}")
        if sample_input.void:
            gate.open(None)
            return
        if len(raw) != len(rows) * self._row_bytes:
            rule = f"must be {self._row_bytes} bytes for each of {len(rows)} rows"
            raise DeltaRefused(f"{where}.mask_bits={len(raw)} bytes: {rule}")
        masks = np.frombuffer(raw, np.uint8).reshape(len(rows), self._row_bytes)
        gate.open(dict(zip(rows, masks, strict=True)))

    def completed(self, step: int) -> None:
        """Forget a step's gate."""
        self._gates.pop(step, None)

    def release(self) -> None:
        """Let nobody wait any more: the batch is dropped."""
        for gate in self._gates.values():
            if not gate.is_open:
                gate.open(None)
        self._gates.clear()
        self._early.clear()
