"""What of a runner's memory sleeps, and how its weights are renewed. Device thread alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from service_chassis.errors import InvalidParameter, WrongState
from worker_service.models.registry import Model
from worker_service.platforms.base import Platform
from worker_service.runner import Progress
from worker_service.sleep.backend import KV_CACHE, MEMORY_TAGS, WEIGHTS, SleepBackend
from worker_service.sleep.renewal import Renewal, check_types
from worker_service.sleep.tensors import tensors_in

_MIB = 1 << 20


class SleepingMemory:
    """The memory of one model and its KV cache."""

    def __init__(self, platform: Platform, backend: SleepBackend | None, renewal: Renewal) -> None:
        """Take ``backend`` None where the worker was not started for sleep: weights can then still be renewed."""
        self._platform = platform
        self._backend = backend
        self._renewal = renewal
        self._asleep: set[str] = set()
        self._source = ""  # of the present weights
        self._is_source_lost = False  # sleeping weights are read again when they wake
        self._staged: Callable[[], None] | None = None
        self._staged_path = ""

    def began(self, source: str) -> None:
        """Note that a model was loaded from ``source``, and is awake."""
        self._source = source
        self._asleep.clear()
        self._is_source_lost = False
        self._staged = None

    def region(self, tag: str) -> AbstractContextManager[object]:
        """Return the context in which the memory of a tag is allocated."""
        return self._backend.region(tag) if self._backend is not None else nullcontext()

    @property
    def asleep(self) -> frozenset[str]:
        """Tags that sleep."""
        return frozenset(self._asleep)

    def sleep(self, level: int, model: Model, kv: object, *, world_size: int) -> int:
        """Give memory back, as far as it is awake; return its bytes. See ``ModelRunner.sleep``."""
        backend = self._backend
        if backend is None:
            raise WrongState("this worker was not started with --enable-sleep-mode")
        if world_size > 1 and not backend.capabilities.preserves_communicators:
            rule = f"the sleep backend {backend.name} would break the connection between {world_size} ranks"
            raise WrongState(rule)
        num_bytes = 0
        if WEIGHTS not in self._asleep:
            num_bytes += self._let_weights_sleep(backend, model, keeps_all=level == 1)
        elif level > 1 and not self._is_source_lost:
            self._is_source_lost = True
            if not self._renewal.without_source(model):
                backend.forget(WEIGHTS)
        if KV_CACHE not in self._asleep:
            num_bytes += backend.sleep(KV_CACHE, kept=[], dropped=tensors_in(kv))
            self._asleep.add(KV_CACHE)
        return num_bytes

    def _let_weights_sleep(self, backend: SleepBackend, model: Model, *, keeps_all: bool) -> int:
        tensors = tensors_in(model)
        kept = tensors if keeps_all else self._renewal.without_source(model)
        ids = {id(tensor) for tensor in kept}
        num_bytes = backend.sleep(WEIGHTS, kept=kept, dropped=[one for one in tensors if id(one) not in ids])
        self._is_source_lost = not keeps_all
        self._asleep.add(WEIGHTS)
        return num_bytes

    def wake_up(self, tags: Iterable[str], model: Model, progress: Progress) -> bool:
        """Take memory again; True if graphs have to be captured anew. See ``ModelRunner.wake_up``."""
        wanted = [tag for tag in MEMORY_TAGS if tag in set(tags) & self._asleep]
        backend = self._backend
        if backend is None or not wanted:
            return False
        self._check_room(sum(backend.asleep_bytes(tag) for tag in wanted), f"to wake {' and '.join(wanted)}")
        for tag in wanted:
            if tag == WEIGHTS and self._is_source_lost:
                self._read_again(backend, model, progress)
            else:
                backend.wake_up(tag)
            self._asleep.discard(tag)
        return not self._asleep and not backend.capabilities.preserves_graphs

    def _read_again(self, backend: SleepBackend, model: Model, progress: Progress) -> None:
        try:
            put = self._read(self._source, model, progress)
        except InvalidParameter as error:
            raise WrongState(f"the weights cannot be read again: {error.message}") from error
        backend.wake_up(WEIGHTS)
        put()
        self._is_source_lost = False

    # Other weights

    def _read(self, path: str, model: Model, progress: Progress) -> Callable[[], None]:
        with _refusing_what_cannot_be_read(path):
            return self._renewal.stage(path, model, progress)

    def stage(self, path: str, model: Model, progress: Progress) -> int:
        """Read the weights of another checkpoint beside the present ones; return the number of its tensors."""
        self.unstage()
        with _refusing_what_cannot_be_read(path):
            num_tensors = check_types(path, self._source)
        if self._platform.device.type == "cpu":  # else they are staged on the host, whose memory is not read here
            self._check_room(model.weight_bytes, "to have old and new weights side by side")
        self._staged, self._staged_path = self._read(path, model, progress), path
        return num_tensors

    def unstage(self) -> None:
        """Let go of weights that were read and not put in place."""
        self._staged = None

    def put_staged(self) -> None:
        """Put the weights that were read in place of the present ones, which may sleep; they are awake then."""
        if self._staged is None:
            raise WrongState("no weights were read that could be put in place")
        put, self._staged = self._staged, None
        if self._backend is not None and WEIGHTS in self._asleep:
            self._backend.forget(WEIGHTS)
            self._backend.wake_up(WEIGHTS)
        put()
        self._asleep.discard(WEIGHTS)
        self._is_source_lost = False
        self._source = self._staged_path

    def _check_room(self, needed: int, purpose: str) -> None:
        available = self._platform.memory().available
        if needed > available:
            rule = f"{needed / _MIB:.0f} MiB are needed {purpose}, and {available / _MIB:.0f} MiB are available"
            raise WrongState(rule)


@contextmanager
def _refusing_what_cannot_be_read(path: str) -> Iterator[None]:
    """Blame the path: nothing has changed yet, so it is no failure of the rank."""
    try:
        yield
    except ConnectionError:
        raise  # another rank is gone: not the path's fault
    except OSError as error:
        raise InvalidParameter("path", path, f"cannot be read: {error.strerror or type(error).__name__}") from error
    except RecursionError as error:
        raise InvalidParameter("path", path, "cannot be read: JSON nested too deeply") from error
