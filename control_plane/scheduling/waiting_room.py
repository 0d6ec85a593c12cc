"""Hold the samples that do not run: who is next, and who is not to be considered yet."""

from __future__ import annotations

from collections.abc import Iterator

from control_plane.scheduling.order_queue import OrderQueue
from control_plane.scheduling.request import Request, Sample, SampleState


class WaitingRoom:
    """Samples without blocks. No step costs more because many wait."""

    def __init__(self) -> None:
        self._waiting: OrderQueue[Sample] = OrderQueue()  # without a row
        self._preempted: OrderQueue[Sample] = OrderQueue()  # with a row
        self._held: dict[Sample, None] = {}  # in neither queue: their first sample is in the prompt, or they are paused
        self._prompt_done: list[Request] = []  # whose other samples are queued by the next `admit_followers`

    def __len__(self) -> int:
        return len(self._waiting) + len(self._preempted) + len(self._held)

    def __iter__(self) -> Iterator[Sample]:
        """In no order."""
        yield from self._waiting
        yield from self._preempted
        yield from self._held

    def enter(self, request: Request) -> None:
        """A request comes: its first sample queues, the others wait for it to get through the prompt."""
        for sample in request.samples:
            if sample.state not in (SampleState.WAITING, SampleState.PREEMPTED):
                continue  # it ended where the request comes from, or runs since then
            if sample.index == 0 or request.prompt_done or sample.state is SampleState.PREEMPTED:
                self.queue(sample)
            else:
                self._held[sample] = None

    def queue(self, sample: Sample) -> None:
        """Queue a sample that is not here."""
        queue = self._preempted if sample.state is SampleState.PREEMPTED else self._waiting
        queue.push(sample.order, sample)

    def remove(self, sample: Sample) -> None:
        """Let a sample go, wherever it is."""
        self._waiting.discard(sample)
        self._preempted.discard(sample)
        self._held.pop(sample, None)

    def first(self, *, has_free_row: bool) -> Sample | None:
        """Return who goes next: the first in order that has a row or could get one. Paused ones are set aside."""
        while True:
            sample = self._preempted.first()
            waiting = self._waiting.first() if has_free_row else None
            if waiting is not None and (sample is None or waiting.order < sample.order):
                sample = waiting
            if sample is None or not sample.request.paused:
                return sample
            self.remove(sample)
            self._held[sample] = None

    def note_prompt_done(self, sample: Sample) -> None:
        """A sample got through its prompt, or ended: if it is the first, the others need not wait for it any more."""
        request = sample.request
        if sample.index == 0 and not request.prompt_done:
            request.prompt_done = True
            if len(request.samples) > 1:
                self._prompt_done.append(request)

    def admit_followers(self) -> None:
        """Queue the samples that waited for their first one. They fork from it in a later step than its last chunk."""
        for request in self._prompt_done:
            self.queue_held(request)
        self._prompt_done.clear()

    def queue_held(self, request: Request) -> None:
        """Queue those of a request's samples that have no reason to be held any more."""
        for sample in request.samples:
            if sample in self._held and (sample.index == 0 or request.prompt_done):
                del self._held[sample]
                self.queue(sample)

    def check_integrity(self) -> None:
        """Raise AssertionError where a sample is in a wrong place."""
        samples = list(self)
        assert len(set(samples)) == len(samples), "a sample waits in two places"
        assert all(sample.state is SampleState.WAITING for sample in self._waiting), "no waiting sample has a row"
        assert all(sample.state is SampleState.PREEMPTED for sample in self._preempted), "a preempted sample has a row"
