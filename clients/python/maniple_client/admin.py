"""What operators ask of a server: ``Client.admin`` and ``AsyncClient.admin``."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Any, Literal

import grpc

from maniple.v1 import admin_pb2
from maniple_client.errors import from_rpc_error

PauseMode = Literal["abort", "wait", "keep"]

_TIMEOUT_S = 30.0
_MODES: dict[PauseMode, admin_pb2.PauseMode.ValueType] = {
    "abort": admin_pb2.PAUSE_MODE_ABORT,
    "wait": admin_pb2.PAUSE_MODE_WAIT,
    "keep": admin_pb2.PAUSE_MODE_KEEP,
}


class Admin:
    """The verbs of ``maniple.v1.AdminService``. Where authentication is on they need the admin scope."""

    def __init__(self, stub: Callable[[], Any]) -> None:
        """Call the stub that ``stub`` returns at the time."""
        self._stub = stub

    def pause(self, mode: PauseMode = "abort", *, clear_cache: bool = False, timeout_s: float | None = None) -> None:
        """Stop scheduling, and return when nothing is computed any more.

        Args:
            mode: requests that are here end ("abort"), finish ("wait"), or freeze ("keep"). Only while they are kept
                are new ones let in; they queue.
            clear_cache: forget cached prefixes too.
            timeout_s: how long to wait for it; the pause comes about all the same.
        """
        request = admin_pb2.PauseGenerationRequest(mode=_MODES[mode], clear_cache=clear_cache)
        self._ask("PauseGeneration", request, timeout_s)

    def resume(self) -> None:
        """Schedule again."""
        self._ask("ResumeGeneration", admin_pb2.ResumeGenerationRequest())

    def is_paused(self) -> bool:
        """Whether a pause has taken effect."""
        return bool(self._ask("IsPaused", admin_pb2.IsPausedRequest()).is_paused)

    def sleep(
        self, level: int = 0, mode: PauseMode = "abort", *, timeout_s: float | None = None
    ) -> admin_pb2.SleepResponse:
        """Sleep, and tell what each rank gave back. Level 0 pauses scheduling; mode as for ``pause``.

        Levels 1 and 2 give memory back: weights are kept elsewhere (1), or read from their source again when they wake
        (2); what the KV cache held is lost, and computed again for requests that are kept.
        """
        request = admin_pb2.SleepRequest(level=level, mode=_MODES[mode])
        answer: admin_pb2.SleepResponse = self._ask("Sleep", request, timeout_s)
        return answer

    def wake_up(self, tags: Iterable[str] = (), *, timeout_s: float | None = None) -> admin_pb2.WakeUpResponse:
        """Wake what ``tags`` name, of "weights", "kv_cache" and "scheduling"; all, where none is named."""
        answer: admin_pb2.WakeUpResponse = self._ask("WakeUp", admin_pb2.WakeUpRequest(tags=tags), timeout_s)
        return answer

    def update_weights(self, path: str, *, timeout_s: float | None = None) -> int:
        """Have all ranks take the weights of a model directory, or none; return the number of tensors.

        Requests wait meanwhile, and go on with the new weights, which compute anew what they have.
        """
        return int(self._ask("UpdateWeights", admin_pb2.UpdateWeightsRequest(path=path), timeout_s).num_tensors)

    def sleeping_tags(self) -> list[str]:
        """Return what sleeps."""
        return list(self._ask("IsSleeping", admin_pb2.IsSleepingRequest()).tags)

    def reset_prefix_cache(self) -> admin_pb2.ResetPrefixCacheResponse:
        """Forget all cached prefixes but those that requests hold."""
        answer: admin_pb2.ResetPrefixCacheResponse = self._ask("ResetPrefixCache", admin_pb2.ResetPrefixCacheRequest())
        return answer

    def start_profile(self, num_steps: int = 0) -> None:
        """Profile the server's process, without its workers: for so many steps, or until it is stopped."""
        self._ask("StartProfile", admin_pb2.StartProfileRequest(num_steps=num_steps))

    def stop_profile(self) -> str:
        """End the profile; return the file on the server's machine, for Python's module pstats."""
        answer: admin_pb2.StopProfileResponse = self._ask("StopProfile", admin_pb2.StopProfileRequest())
        return answer.path

    def drain(self, deadline_s: float = 0.0) -> Iterator[admin_pb2.DrainResponse]:
        """Accept no more requests, and tell how many are left until none is; after ``deadline_s`` abort the rest."""
        try:
            yield from self._stub().Drain(admin_pb2.DrainRequest(deadline_s=deadline_s))
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error

    def _ask(self, method: str, request: Any, timeout_s: float | None = _TIMEOUT_S) -> Any:
        try:
            return getattr(self._stub(), method)(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error


class AsyncAdmin:
    """The same for asyncio. Arguments as ``Admin``."""

    def __init__(self, stub: Callable[[], Any]) -> None:
        self._stub = stub

    async def pause(
        self, mode: PauseMode = "abort", *, clear_cache: bool = False, timeout_s: float | None = None
    ) -> None:
        """Stop scheduling, and return when nothing is computed any more."""
        request = admin_pb2.PauseGenerationRequest(mode=_MODES[mode], clear_cache=clear_cache)
        await self._ask("PauseGeneration", request, timeout_s)

    async def resume(self) -> None:
        """Schedule again."""
        await self._ask("ResumeGeneration", admin_pb2.ResumeGenerationRequest())

    async def is_paused(self) -> bool:
        """Whether a pause has taken effect."""
        return bool((await self._ask("IsPaused", admin_pb2.IsPausedRequest())).is_paused)

    async def sleep(
        self, level: int = 0, mode: PauseMode = "abort", *, timeout_s: float | None = None
    ) -> admin_pb2.SleepResponse:
        """Sleep, and tell what each rank gave back. Level 0 pauses scheduling."""
        request = admin_pb2.SleepRequest(level=level, mode=_MODES[mode])
        answer: admin_pb2.SleepResponse = await self._ask("Sleep", request, timeout_s)
        return answer

    async def wake_up(self, tags: Iterable[str] = (), *, timeout_s: float | None = None) -> admin_pb2.WakeUpResponse:
        """Wake what ``tags`` name; all, where none is named."""
        answer: admin_pb2.WakeUpResponse = await self._ask("WakeUp", admin_pb2.WakeUpRequest(tags=tags), timeout_s)
        return answer

    async def update_weights(self, path: str, *, timeout_s: float | None = None) -> int:
        """Have all ranks take the weights of a model directory, or none; return the number of tensors."""
        answer = await self._ask("UpdateWeights", admin_pb2.UpdateWeightsRequest(path=path), timeout_s)
        return int(answer.num_tensors)

    async def sleeping_tags(self) -> list[str]:
        """Return what sleeps."""
        return list((await self._ask("IsSleeping", admin_pb2.IsSleepingRequest())).tags)

    async def reset_prefix_cache(self) -> admin_pb2.ResetPrefixCacheResponse:
        """Forget all cached prefixes but those that requests hold."""
        answer: admin_pb2.ResetPrefixCacheResponse = await self._ask(
            "ResetPrefixCache", admin_pb2.ResetPrefixCacheRequest()
        )
        return answer

    async def start_profile(self, num_steps: int = 0) -> None:
        """Profile the server's process, without its workers: for so many steps, or until it is stopped."""
        await self._ask("StartProfile", admin_pb2.StartProfileRequest(num_steps=num_steps))

    async def stop_profile(self) -> str:
        """End the profile; return the file on the server's machine, for Python's module pstats."""
        answer: admin_pb2.StopProfileResponse = await self._ask("StopProfile", admin_pb2.StopProfileRequest())
        return answer.path

    async def drain(self, deadline_s: float = 0.0) -> AsyncIterator[admin_pb2.DrainResponse]:
        """Accept no more requests, and tell how many are left until none is; after ``deadline_s`` abort the rest."""
        try:
            async for report in self._stub().Drain(admin_pb2.DrainRequest(deadline_s=deadline_s)):
                yield report
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error

    async def _ask(self, method: str, request: Any, timeout_s: float | None = _TIMEOUT_S) -> Any:
        try:
            return await getattr(self._stub(), method)(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
