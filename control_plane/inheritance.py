"""Go on with what another owner left: a batch that runs in the group, or what survived of one that was lost with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from control_plane.adopted_batch import BatchOfRequests, requests_of
from control_plane.collector import collector_paused
from control_plane.constrained_requests import ConstrainedRequests
from control_plane.deltas import DeltaEncoder
from control_plane.engine_status import RequestIds
from control_plane.group.batch_snapshot import BatchSnapshot
from control_plane.live_request import LiveRequest
from control_plane.live_requests import LiveRequests
from control_plane.scheduling.scheduler import Scheduler
from control_plane.text.tokenizer import Tokenizer
from service_chassis.errors import GroupLost, ManipleError


@dataclass(frozen=True, slots=True, kw_only=True)
class Inheritance:
    """The parts of a new engine that take in requests of another owner. Their clients come back, or are given up."""

    scheduler: Scheduler
    encoder: DeltaEncoder
    live: LiveRequests
    constrained: ConstrainedRequests
    ids: RequestIds
    tokenizer: Tokenizer
    end: Callable[[LiveRequest, ManipleError | None, bool], None]  # as of ``Departure``
    now: float  # on the engine's clock
    resume_grace_s: float  # how long a request waits for its client

    def adopt(self, snapshot: BatchSnapshot) -> int:
        """Go on with a batch that runs; return the number of the request that arrived last.

        Raises:
            SnapshotUnreadable: the batch is not what the ranks report of it.
        """
        with collector_paused():
            self.encoder.adopt(snapshot)
            batch = self._remember(snapshot)
            self.scheduler.adopt([one.adopted for one in batch.continued], snapshot.cached)
            for one in batch.continued:
                self._wait_for_client(one.live)
                if not one.live.is_over:
                    self.constrained.enter(one.live, one.adopted.request)
            return batch.last_arrival_number

    def readmit(self, snapshot: BatchSnapshot) -> int:
        """Compute anew what was lost with its group before it could be adopted. What clients were told stays told."""
        batch = self._remember(snapshot)
        for one in batch.continued:
            self._wait_for_client(one.live)
            if one.live.is_over:
                continue
            request = one.readmitted()
            if self.scheduler.refusal(request) is None:
                self.scheduler.add(request)
                self.constrained.enter(one.live, request)
            else:
                error = GroupLost("the group was lost, and the request does not fit the new one")
                self.end(one.live, error, False)
        return batch.last_arrival_number

    def _remember(self, snapshot: BatchSnapshot) -> BatchOfRequests:
        limit_of = self.scheduler.limit_of
        batch = requests_of(snapshot, limit_of=limit_of, tokenizer=self.tokenizer, now=self.now)
        for ended in batch.remembered:
            self.ids.add_finished(ended.request_id, self.now - ended.age_s, is_free=ended.is_free, tell=ended.tell)
        return batch

    def _wait_for_client(self, live: LiveRequest) -> None:
        self.live.enter(live)
        if live.is_over:
            # Nobody can ask for a vector again but by its id.
            self.end(live, None, live.generation.pooling is not None)
        else:
            self.live.detach(live, self.now + self.resume_grace_s)
