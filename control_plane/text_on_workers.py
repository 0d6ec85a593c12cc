"""Learn the text side of a model whose files lie only with the workers: from the first rank 0 that has loaded it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from control_plane.executors.base import Executor, RankCallError
from control_plane.group.loss import GroupNotFormed, LossReason
from control_plane.group.sent_files import fetch_model_files
from control_plane.text.model_files import TEXT_FILES, SentFiles
from control_plane.text.model_text import ModelText, text_of_files
from service_chassis.telemetry import get_logger

log = get_logger()

_TIMEOUT_S = 60.0  # some 20 MiB, over whatever network


class TextOnWorkers:
    """What is fetched once, for all groups: they hold one model.

    Args:
        directory: of the model, on the workers.
        on_text: told what was learned, once.
    """

    def __init__(self, directory: str, on_text: Callable[[ModelText], None]) -> None:
        self._directory = directory
        self._on_text = on_text
        self._fetching = asyncio.Lock()
        self._is_known = False

    async def learn(self, executor: Executor) -> None:
        """Have it from rank 0, unless it is known already. The rank needs no owner for this, only its model.

        Raises:
            GroupNotFormed: rank 0 has not loaded a model, cannot be reached, or sent something else.
            ConfigurationError: what it sent is no text side of a model.
        """
        async with self._fetching:
            if self._is_known:
                return
            rank = executor.ranks[0]
            try:
                contents = await fetch_model_files(executor, rank, TEXT_FILES, timeout_s=_TIMEOUT_S)
            except RankCallError as error:
                reason = f"rank {rank} failed at {error.method}: {error.cause}"
                raise GroupNotFormed(LossReason(rank, reason)) from error
            if not contents:
                reason = f"rank {rank} has loaded no model from {self._directory}, whose tokenizer is needed here"
                raise GroupNotFormed(LossReason(rank, reason))
            files = SentFiles(self._directory, contents)
            # A large vocabulary takes a second to read.
            text = await asyncio.to_thread(text_of_files, files)
            num_bytes = sum(map(len, contents.values()))
            log.info("model_files.fetched", rank=rank, num_files=len(contents), num_bytes=num_bytes)
            self._is_known = True
            self._on_text(text)
