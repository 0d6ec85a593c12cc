"""Replay a recorded log of deltas offline: ``python -m worker_service.replay FILE``, or ``maniple replay FILE``.

Every delta goes through the batch state that a rank has, and nothing else: no device, no model, no torch. It must come
to the digest that the delta itself carries, and the tokens that were answered to the token digest that the owner had.
The first step that does not is named.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
from google.protobuf.message import DecodeError

from maniple.v1.delta_log_pb2 import DeltaLogEntry
from maniple.v1.scheduler_delta_pb2 import SchedulerDelta, StepResult
from service_chassis.command_parser import CommandParser
from service_chassis.errors import DeltaRefused, OutOfOrder
from service_chassis.protocol.arrays import token_terms_sum
from service_chassis.protocol.delta_recording import NotARecording, read_records
from service_chassis.protocol.digest import MASK64, row_factor, token_term
from worker_service.batch_rows import BatchLimits
from worker_service.batch_state import BatchState
from worker_service.step_work import NewRow, StepWork

Formation = DeltaLogEntry.Formation

OK, DIFFERS, USAGE = 0, 1, 2


@dataclass(slots=True)
class Tenure:
    """What came of the deltas of one owner of one group."""

    group: str
    formation: Formation
    last_step: int
    num_results: int = 0
    num_token_digests: int = 0  # compared
    difference: str = ""  # the first; nothing after it was looked at

    def __str__(self) -> str:
        one = self.formation
        where = f"group {self.group}, formation {one.formation_id}, epoch {one.epoch}, ranks {one.world_size}"
        if self.difference:
            return f"{where}: {self.difference}"
        if self.last_step < one.first_step:
            return f"{where}: no step"
        return (
            f"{where}: steps {one.first_step} to {self.last_step}: every state digest equal; "
            f"{self.num_results} results, {self.num_token_digests} token digests equal"
        )


class _Row:
    """One row's known tokens."""

    def __init__(self, row_key: int, token_ids: list[int]) -> None:
        self.factor = row_factor(row_key)
        self.token_ids = token_ids
        self.digest = token_terms_sum(row_key, 0, token_ids)

    def add(self, token_id: int) -> None:
        self.digest += token_term(self.factor, len(self.token_ids), token_id)
        self.token_ids.append(token_id)


class _KnownTokens:
    """The known tokens of all rows, at the last step that was answered."""

    def __init__(self) -> None:
        self._rows: dict[int, _Row] = {}
        self._works: deque[StepWork] = deque()  # applied, not answered
        self._digests: dict[int, int] = {}  # by step, answered and not taken; at most those in flight

    def take_digest(self, step: int) -> int | None:
        """Return the digest after an answered step; None if its result is not here."""
        return self._digests.pop(step, None)

    def expect(self, work: StepWork) -> None:
        self._works.append(work)

    def answer(self, result: StepResult) -> bool:
        """Take a result; False where the log lacks one before it, or it fits no step, so that tokens are not known."""
        while self._works and self._works[0].step <= result.step:
            work = self._works.popleft()
            self._move(work)
            sampled = work.rows[work.samples].tolist()
            token_ids = list(result.token_ids) if work.step == result.step else []
            if len(result.num_tokens) == len(sampled):  # else one each
                sampled = np.repeat(sampled, result.num_tokens).tolist()
            if len(sampled) != len(token_ids):
                return False
            for req_index, token_id in zip(sampled, token_ids, strict=True):
                self._rows[req_index].add(token_id)
        self._digests[result.step] = sum(row.digest for row in self._rows.values()) & MASK64
        return True

    def _move(self, work: StepWork) -> None:
        for row in work.finished:
            del self._rows[row.req_index]
        for new in work.new_rows:
            self._rows[new.req_index] = _Row(new.row_key, self._first_tokens(new))

    def _first_tokens(self, new: NewRow) -> list[int]:
        if new.fork_of is None:
            token_ids: list[int] = new.token_ids.tolist()
            return token_ids
        return self._rows[new.fork_of].token_ids[: new.num_prefill_tokens]


class _Group:
    """The present tenure of one group."""

    def __init__(self, name: str, formation: Formation) -> None:
        self.tenure = Tenure(name, formation, formation.first_step - 1)
        # Steps above 1 go on from a batch; that of a log that begins there must have been empty.
        self.assumes_empty = formation.first_step > 1
        self._state = BatchState(_limits(formation), accepted=formation.first_step - 1)
        self._tokens: _KnownTokens | None = _KnownTokens()
        self._masked: set[int] = set()  # keys of rows that sampled under a mask

    def go_on(self, formation: Formation) -> bool:
        """Whether the batch goes on under another owner; if so, begin that tenure."""
        if (
            formation.formation_id != self.tenure.formation.formation_id
            or formation.first_step != self._state.accepted + 1
            or self.tenure.difference
        ):
            return False
        self.tenure = Tenure(self.tenure.group, formation, self._state.accepted)
        self._tokens = None  # what was sampled between two owners is in no log
        return True

    def take(self, entry: DeltaLogEntry) -> None:
        if self.tenure.difference:
            return
        kind = entry.WhichOneof("entry")
        if kind == "delta":
            self._apply(entry.delta)
        elif kind == "result":
            self.tenure.num_results += 1
            if self._tokens is not None and not self._tokens.answer(entry.result):
                self.tenure.difference = f"step {entry.result.step}: the result does not fit the step"
        elif kind == "token_digest" and self._tokens is not None:
            step, value = entry.token_digest.step, entry.token_digest.value
            digest = self._tokens.take_digest(step)
            self.tenure.num_token_digests += 1
            if digest is None:
                self.tenure.difference = f"step {step}: its result is missing"
            elif digest != value:
                self.tenure.difference = (
                    f"step {step}: the token digest was {value:#018x}, the tokens answered give {digest:#018x}"
                )

    def _apply(self, raw: bytes) -> None:
        try:
            delta = SchedulerDelta.FromString(raw)
        except DecodeError:
            self.tenure.difference = f"step {self._state.accepted + 1}: {len(raw)} bytes are no SchedulerDelta"
            return
        if self._tokens is None:
            self._take_its_word(delta)
        try:
            work = self._state.apply(delta)
        except (DeltaRefused, OutOfOrder) as error:
            self.tenure.difference = error.message
            if self.assumes_empty and self._state.accepted < self.tenure.formation.first_step:
                self.tenure.difference += " (the batch that this owner took over is not in this log)"
            return
        self.tenure.last_step = work.step
        self._masked.update(key for row in work.awaits_mask if (key := self._state.row_key(row)) is not None)
        if self._tokens is not None:
            self._tokens.expect(work)

    def _take_its_word(self, delta: SchedulerDelta) -> None:
        """Believe a later owner how many tokens rows know whose masks may have died with an earlier one.

        That they sampled nothing is said by ranks, and in no log.
        """
        for change in delta.changes:
            key = self._state.row_key(change.req_index)
            if key in self._masked and change.HasField("num_prefill_tokens"):
                self._state.note_void(change.req_index, key, change.num_prefill_tokens)


def _limits(formation: Formation) -> BatchLimits:
    limits = formation.limits
    return BatchLimits(
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=limits.max_model_len,
        block_size=limits.block_size,
        num_blocks=limits.num_blocks,
        vocab_size=formation.vocab_size,
        num_kv_groups=formation.num_kv_groups,
        num_speculative_tokens=limits.num_speculative_tokens,
    )


def replay(entries: Iterable[DeltaLogEntry]) -> list[Tenure]:
    """Replay a log; return what came of each tenure, in the order in which they began."""
    groups: dict[str, _Group] = {}
    tenures: list[Tenure] = []
    for entry in entries:
        group = groups.get(entry.group)
        if not entry.HasField("formation"):
            if group is not None:
                group.take(entry)
            continue
        if group is None or not group.go_on(entry.formation):
            group = groups[entry.group] = _Group(entry.group, entry.formation)
        tenures.append(group.tenure)
    return tenures


def read_entries(file: BinaryIO) -> Iterator[DeltaLogEntry]:
    """Yield the entries of a log. Raises ``NotARecording`` on reading."""
    for index, record in enumerate(read_records(file)):
        try:
            yield DeltaLogEntry.FromString(record)
        except DecodeError:
            raise NotARecording(f"record {index} is no entry of a delta log") from None


def main(argv: Sequence[str] | None = None) -> int:
    """Replay a file, print what came of it, return the exit code."""
    parser = CommandParser(
        prog="maniple replay",
        description="Replay a log that `--record-deltas` wrote: every delta must lead the batch state to the digest "
        "that it carries. Names the first step that does not. Needs neither workers nor a model. A log holds the "
        "prompts and outputs of its requests; what this prints holds none of them.",
        epilog="Exit code 0: every digest equal; 1: one differs; 2: no log.\n\nExamples:\n"
        "  maniple serve --record-deltas /tmp/deltas\n  maniple replay /tmp/deltas",
    )
    parser.add_argument("file", metavar="FILE", help="the log")
    path = parser.parse_args(argv).file
    try:
        with open(path, "rb") as file:
            tenures = replay(read_entries(file))
    except (OSError, NotARecording) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        print(f"maniple replay: {path}: {reason}", file=sys.stderr)
        return USAGE
    for tenure in tenures:
        print(tenure)
    if not tenures:
        print("the log is empty")
    return DIFFERS if any(tenure.difference for tenure in tenures) else OK


if __name__ == "__main__":
    sys.exit(main())
