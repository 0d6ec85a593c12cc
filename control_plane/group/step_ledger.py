"""Keep what was sent and is not settled: the bytes to resend, who accepted what, which answer is due. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from maniple.v1 import worker_pb2
from service_chassis.ids import Rank


@dataclass(slots=True)
class SentStep:
    """One delta under way. ``message`` is built once, so that every rank and every resend gets the same bytes."""

    step: int
    message: worker_pb2.StepsRequest
    expects_result: bool
    num_tokens: int
    sent_at: float


class Answer(Enum):
    """What a result means."""

    DUE = "due"
    DUPLICATE = "duplicate"  # resent after a reconnect; it was read before
    GAP = "gap"  # an earlier one is missing


class StepLedger:
    """The steps of one tenure, from its first delta on."""

    def __init__(self, ranks: Sequence[Rank], *, accepted: int = 0) -> None:
        """Begin after step ``accepted``, which all ranks have."""
        self.last_sent = accepted
        self.last_result = accepted
        self.accepted_by_all = accepted
        self._accepted = dict.fromkeys(ranks, accepted)
        self._unaccepted: deque[SentStep] = deque()  # steps above accepted_by_all, in order
        self._unanswered: deque[SentStep] = deque()  # of those sent, the ones that still owe a result, in order
        self._sample_inputs: dict[int, worker_pb2.StepsRequest] = {}

    @classmethod
    def taken_over(cls, accepted: Mapping[Rank, int], relayed: Iterable[SentStep]) -> StepLedger:
        """Begin where another owner left the ranks.

        Args:
            accepted: the last step that each rank accepted.
            relayed: the steps that some rank lacks, in order; their results are nobody's but a snapshot's.
        """
        ledger = cls(list(accepted), accepted=min(accepted.values()))
        for sent in relayed:
            ledger.add(sent)
        for rank, step in accepted.items():
            ledger.accept(rank, step)
        ledger.last_result = ledger.last_sent
        return ledger

    def add(self, sent: SentStep) -> None:
        """Enter the next step."""
        assert sent.step == self.last_sent + 1, f"step {sent.step} sent after step {self.last_sent}"
        self.last_sent = sent.step
        self._unaccepted.append(sent)
        if sent.expects_result:
            self._unanswered.append(sent)

    def message(self, step: int) -> worker_pb2.StepsRequest | None:
        """Return the delta of ``step`` if some rank may still need it."""
        index = step - self.accepted_by_all - 1
        return self._unaccepted[index].message if 0 <= index < len(self._unaccepted) else None

    def accepted(self, rank: Rank) -> int:
        """Return the last step the rank is known to have accepted."""
        return self._accepted[rank]

    def accept(self, rank: Rank, step: int) -> bool:
        """Note that a rank accepted everything up to ``step``; say whether all ranks moved on by that."""
        if step <= self._accepted[rank]:
            return False
        self._accepted[rank] = step
        settled = min(self._accepted.values())
        if settled == self.accepted_by_all:
            return False
        while self._unaccepted and self._unaccepted[0].step <= settled:
            self._unaccepted.popleft()
        self.accepted_by_all = settled
        return True

    def answer(self, step: int) -> Answer:
        """Note a result of the output rank."""
        if step <= self.last_result:
            return Answer.DUPLICATE
        if not self._unanswered or self._unanswered[0].step != step:
            return Answer.GAP
        self._unanswered.popleft()
        self._sample_inputs.pop(step, None)
        self.last_result = step
        return Answer.DUE

    @property
    def next_result(self) -> int:
        """The step whose result is due next; 0 if none."""
        return self._unanswered[0].step if self._unanswered else 0

    @property
    def oldest(self) -> SentStep | None:
        """The oldest step that is outstanding: without its result, or not accepted by every rank."""
        first = [steps[0] for steps in (self._unanswered, self._unaccepted) if steps]
        return min(first, key=lambda sent: sent.step, default=None)

    def add_sample_input(self, step: int, message: worker_pb2.StepsRequest) -> None:
        """Keep what the sampling of ``step`` waits for, until its result came."""
        self._sample_inputs[step] = message

    def sample_inputs_above(self, completed: int) -> list[worker_pb2.StepsRequest]:
        """Return the kept sample inputs of all steps above ``completed``, in order."""
        return [message for step, message in sorted(self._sample_inputs.items()) if step > completed]
