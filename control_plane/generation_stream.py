"""Hand a generation's events from the engine to one consumer, however slow it is.

The engine puts and never waits; what was not taken yet is merged, so a stalled client costs memory in proportion to its
own tokens and delays nobody. Consumers take turns (``Turns``): reading one event is one turn.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from control_plane.generation import (
    Chunk,
    Done,
    Embedded,
    Event,
    Generation,
    PromptLogprobs,
    SampleFinished,
    Started,
    Waiting,
)
from control_plane.turns import Turns
from service_chassis.errors import Cancelled, ManipleError
from service_chassis.protocol.logprobs import Logprobs

# Entries of log-probabilities in one chunk, some nine bytes each: however slow its client, it fits into a message.
_MAX_CHUNK_ENTRIES = 65536


class GenerationStream:
    """An asynchronous iterator of events for one consumer, in one event loop.

    Ends after ``Done``; raises the ``ManipleError`` with which the request ended badly, after what came before it.
    """

    def __init__(self, generation: Generation, on_cancel: Callable[[], None]) -> None:
        self.generation = generation
        self._on_cancel = on_cancel
        self._pending: deque[Event | ManipleError] = deque()
        self._open_chunks: dict[int, Chunk] = {}  # sample index -> the chunk in _pending that may still grow
        self._turns: Turns | None = None  # of the consumer's loop, once it reads
        self._waiter: asyncio.Future[None] | None = None  # the consumer's, while nothing is pending
        self._closed = False  # the engine put its last event

    def put_started(self, started: Started) -> None:
        """Say that the request entered its first delta."""
        self._put(started)

    def put_waiting(self) -> None:
        """Say that nothing happens, where there is nothing else to say."""
        if not self._pending:
            self._put(Waiting())

    def put_prompt_logprobs(self, columns: Logprobs) -> None:
        """Say what was asked of the prompt."""
        self._put(PromptLogprobs(columns=columns))

    def put_tokens(self, index: int, token_ids: Sequence[int], text: str, logprobs: Logprobs | None = None) -> None:
        """Add output of one sample to the chunk that waits for the consumer, or to a new one.

        Log-probabilities, a position a token, are cut into chunks that fit into a message; the text is in the last. The
        columns are the stream's from now on.
        """
        if logprobs is None:
            self._merge(index, token_ids, text, None)
            return
        start = 0
        pieces = list(logprobs.pieces(_MAX_CHUNK_ENTRIES)) or [logprobs]
        for piece in pieces:
            waiting, stop = self._open_chunks.get(index), start + len(piece)
            num_waiting = len(waiting.logprobs) if waiting is not None and waiting.logprobs is not None else 0
            if num_waiting and (num_waiting + len(piece)) * piece.width > _MAX_CHUNK_ENTRIES:
                del self._open_chunks[index]
            self._merge(index, token_ids[start:stop], text if piece is pieces[-1] else "", piece)
            start = stop

    def _merge(self, index: int, token_ids: Sequence[int], text: str, logprobs: Logprobs | None) -> None:
        chunk = self._open_chunks.get(index)
        if chunk is None:
            chunk = Chunk(index=index, token_ids=list(token_ids), text=text, logprobs=logprobs)
            self._open_chunks[index] = chunk
            self._put(chunk)
            return
        chunk.token_ids += token_ids
        chunk.text += text
        if chunk.logprobs is not None and logprobs is not None:
            chunk.logprobs.extend(logprobs)

    def put_vector(self, vector: Sequence[float]) -> None:
        """Give a request that pools its vector."""
        self._put(Embedded(vector=vector))

    def put_finished(self, finished: SampleFinished) -> None:
        """End one sample."""
        self._open_chunks.pop(finished.index, None)
        self._put(finished)

    def close(self, last: Done | ManipleError) -> None:
        """Put the last event. What is put later is ignored."""
        self._put(last)
        self._closed = True

    def cancel(self) -> None:
        """Give the generation up: the consumer is gone. Frees its blocks within a step. Idempotent."""
        if not self._closed:
            self._closed = True
            self._pending.clear()
            self._pending.append(Cancelled("the request was cancelled by its client"))
            self._wake()
            self._on_cancel()

    def belong_to(self, on_cancel: Callable[[], None]) -> None:
        """Say whom to tell of a cancel from now on: where the request is."""
        self._on_cancel = on_cancel

    def __aiter__(self) -> GenerationStream:
        return self

    async def __anext__(self) -> Event:
        turns = self._turns = self._turns or Turns.here()
        if not self._pending:
            if self._closed:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter  # which is in line from the first event on
        elif not turns.take():
            turn = asyncio.get_running_loop().create_future()
            turns.line_up(turn)
            await turn
        event = self._pending.popleft()
        if isinstance(event, ManipleError):
            raise event
        if isinstance(event, Chunk) and self._open_chunks.get(event.index) is event:
            del self._open_chunks[event.index]
        return event

    def _put(self, event: Event | ManipleError) -> None:
        if not self._closed:
            self._pending.append(event)
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None:
            assert self._turns is not None, "whoever waits reads"
            self._turns.line_up(self._waiter)
            self._waiter = None
