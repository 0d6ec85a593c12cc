"""Stream what the prefix caches of all groups hold, and how busy they are, to one subscriber."""

from __future__ import annotations

import time
from collections.abc import Iterator

from smg_grpc_proto.generated import common_pb2

from control_plane.doors.kv_event_messages import batch_message, snapshot_messages
from control_plane.doors.load_messages import engine_load, scheduler_load
from control_plane.fleet import Fleet
from control_plane.kv_event_log import KvFollower

# A silent stream says the load again after so long; gateways take a worker whose load stops for dead.
HEARTBEAT_S = 1.0
# A stream of events says the load no more often than that.
_LOAD_EVERY_S = 0.1


class KvEventStream:
    """The messages of one subscription. Numbers count by group, which is a rank of data parallelism to gateways."""

    def __init__(self, fleet: Fleet, follower: KvFollower) -> None:
        self._fleet = fleet
        self._follower = follower
        self._samples = 0  # of the load, told so far
        self._load_told_at = 0.0

    def beginning(self) -> Iterator[common_pb2.KvEventBatch]:
        """Yield all that the groups hold now."""
        sizes = self._block_sizes()
        for dp_rank, snapshot in enumerate(self._follower.snapshots()):
            yield from snapshot_messages(snapshot, dp_rank, sizes[dp_rank])

    def news(self) -> list[common_pb2.KvEventBatch]:
        """Return what happened since then, in part where it is much. Raises ``EventsLost``."""
        batches = self._follower.news()
        if not batches:
            return []
        sizes = self._block_sizes()
        messages = [batch_message(batch, dp_rank, sizes[dp_rank]) for dp_rank, batch in batches]
        if time.monotonic() - self._load_told_at >= _LOAD_EVERY_S:
            self._tell_load({message.dp_rank: message for message in messages}, load_only=False)
        return messages

    def heartbeat(self) -> list[common_pb2.KvEventBatch]:
        """Return how busy each group is, under the number that was told last."""
        now = time.time()
        messages = [
            common_pb2.KvEventBatch(sequence_number=sequence, timestamp=now, dp_rank=dp_rank)
            for dp_rank, sequence in enumerate(self._follower.told())
        ]
        self._tell_load({message.dp_rank: message for message in messages}, load_only=True)
        return [message for message in messages if message.HasField("load")]

    def _tell_load(self, by_rank: dict[int, common_pb2.KvEventBatch], *, load_only: bool) -> None:
        self._samples += 1
        self._load_told_at = time.monotonic()
        for dp_rank, view in enumerate(self._fleet.status().groups):
            if dp_rank in by_rank and view.engine is not None and view.limits is not None:
                load = scheduler_load(dp_rank, view.engine, view.limits)
                by_rank[dp_rank].load.CopyFrom(engine_load(load, sample=self._samples, load_only=load_only))

    def _block_sizes(self) -> list[int]:
        return [view.limits.block_size if view.limits is not None else 0 for view in self._fleet.status().groups]
