"""Record every delta and its result to a file (``--record-deltas``), off the event loop.

Recording must never slow a step: entries go into a bounded queue that one thread writes. Where the disk does not keep
up, or fails, a group's recording pauses until the group is formed anew, since a log with a hole in it leads nowhere.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import BinaryIO

from control_plane.group.settings import GroupFacts
from maniple.v1 import worker_pb2
from maniple.v1.delta_log_pb2 import DeltaLogEntry
from maniple.v1.scheduler_delta_pb2 import StepResult
from service_chassis.errors import ConfigurationError
from service_chassis.protocol.delta_recording import NotARecording, check_path, framed, open_for_appending
from service_chassis.telemetry import get_logger

log = get_logger()

# Some seconds of steps with long prompts.
_MAX_QUEUED_BYTES = 64 << 20
# How long an owner that handed its group over may take to close the log.
_LOCK_WAIT_S = 5.0
_LOCK_POLL_S = 0.05


class DeltaRecorder:
    """The file of one control plane and the thread that writes it."""

    def __init__(self, open_file: Callable[[], BinaryIO], *, max_queued_bytes: int = _MAX_QUEUED_BYTES) -> None:
        """Take what opens the file, once there is something to write: until then it is that of an owner before us."""
        self._open_file = open_file
        self._max_queued_bytes = max_queued_bytes
        self._changed = threading.Condition()
        # All under the condition's lock:
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0
        self._is_closing = False
        self._failure = ""  # why nothing is written any more
        self._thread = threading.Thread(target=self._write_all, name="delta-recorder", daemon=True)
        self._thread.start()

    @classmethod
    def at(cls, path: str) -> DeltaRecorder:
        """Begin a log at ``path``, or go on with the one that is there.

        Raises:
            ConfigurationError: neither is possible.
        """
        try:
            check_path(path)
        except (OSError, NotARecording) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise ConfigurationError([("record_deltas", path, f"cannot be recorded to: {reason}")]) from error
        log.warning("delta_log.opened", path=path, reason="prompts and outputs are recorded")
        return cls(functools.partial(open_for_appending, path))

    def put(self, entry: DeltaLogEntry) -> str:
        """Queue an entry; never waits. Return why it could not be queued, or nothing."""
        record = framed(entry.SerializeToString())
        with self._changed:
            if self._failure or self._is_closing:
                return self._failure or "the log is closed"
            if self._queued_bytes + len(record) > self._max_queued_bytes:
                return f"the file is {self._queued_bytes} bytes behind"
            self._queue.append(record)
            self._queued_bytes += len(record)
            self._changed.notify()
        return ""

    def close(self) -> None:
        """Write what is queued, then close the file. Waits for the disk, but not for ever. Safe to call twice."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(timeout=5.0)

    def _write_all(self) -> None:
        file: BinaryIO | None = None
        try:
            while records := self._next_records():
                file = file or self._open()
                view = memoryview(b"".join(records))
                while view:
                    view = view[file.write(view) :]
        except (OSError, NotARecording) as error:
            reason = (isinstance(error, OSError) and error.strerror) or str(error)
            with self._changed:
                self._failure = f"the file cannot be written: {reason}"
                self._queue.clear()
            log.error("delta_log.failed", reason=reason)
        finally:
            if file is not None:
                file.close()

    def _open(self) -> BinaryIO:
        """Open the file; wait for an owner before us that closes it just now."""
        deadline = time.monotonic() + _LOCK_WAIT_S
        while True:
            try:
                return self._open_file()
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise OSError(0, "another process writes it") from None
            time.sleep(_LOCK_POLL_S)

    def _next_records(self) -> list[bytes]:
        """Wait for records and return all that are queued; none at the end."""
        with self._changed:
            while not self._queue and not self._is_closing:
                self._changed.wait()
            records = list(self._queue)
            self._queue.clear()
            self._queued_bytes = 0
            return records


class GroupRecording:
    """What one group adds to a log. Used by the event loop."""

    def __init__(self, recorder: DeltaRecorder, group: str) -> None:
        """Begin nothing before ``formed``."""
        self._recorder = recorder
        self._group = group
        self._is_whole = False  # since ``formed``

    def formed(self, facts: GroupFacts, world_size: int) -> None:
        """Begin: the group lives."""
        formation = DeltaLogEntry.Formation(
            formation_id=facts.formation_id,
            epoch=facts.epoch,
            first_step=facts.first_step,
            limits=worker_pb2.GroupLimits(
                max_num_seqs=facts.max_num_seqs,
                max_num_batched_tokens=facts.max_num_batched_tokens,
                max_model_len=facts.max_model_len,
                block_size=facts.block_size,
                num_blocks=facts.num_blocks,
                max_steps_in_flight=facts.max_steps_in_flight,
                num_speculative_tokens=facts.num_speculative_tokens,
                prompt_lookup_min=facts.prompt_lookup_min,
                prompt_lookup_max=facts.prompt_lookup_max,
            ),
            vocab_size=facts.model.vocab_size,
            num_kv_groups=facts.model.num_kv_groups,
            world_size=world_size,
            model=facts.model.source,
        )
        self._is_whole = True
        self._put(DeltaLogEntry(formation=formation))

    def sent(self, delta: bytes) -> None:
        """Record a delta, in step order."""
        self._put(DeltaLogEntry(delta=delta))

    def answered(self, result: StepResult) -> None:
        """Record a result."""
        self._put(DeltaLogEntry(result=result))

    def counted(self, step: int, token_digest: int) -> None:
        """Record what the tokens add up to after the result of ``step``."""
        self._put(DeltaLogEntry(token_digest=DeltaLogEntry.TokenDigest(step=step, value=token_digest)))

    def _put(self, entry: DeltaLogEntry) -> None:
        if not self._is_whole:
            return
        entry.group = self._group
        if reason := self._recorder.put(entry):
            self._is_whole = False
            log.error("delta_log.paused", group=self._group, reason=reason)
