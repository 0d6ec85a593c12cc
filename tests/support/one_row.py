"""Write the deltas of one decoding row by hand, and say what the scripted model must answer.

Independent of the scheduler and of the worker: the rules are those of the protocol's text.
"""

from __future__ import annotations

from collections.abc import Sequence

from maniple.v1 import sampling_pb2, scheduler_delta_pb2
from service_chassis.protocol.digest import StateDigest, mix

Delta = scheduler_delta_pb2.SchedulerDelta
BLOCK_SIZE = 16
ROW_KEY = 0xABCD


class OneRow:
    """The steps of a batch with a single greedy row."""

    def __init__(self, prompt: Sequence[int] = (72, 105, 33)) -> None:
        self.prompt = tuple(prompt)
        self.step = 0
        self._digest = StateDigest()
        self._num_computed = 0
        self._num_blocks = 0

    def next(self) -> Delta:
        """Return the next RUN step: the whole prompt, then one token a step."""
        self.step += 1
        delta = Delta(step=self.step, mode=Delta.MODE_RUN)
        if self.step == 1:
            self._num_blocks = -(-len(self.prompt) // BLOCK_SIZE)
            block_ids = list(range(1, self._num_blocks + 1))
            delta.new_requests.append(self._new_request(block_ids))
            self._digest.add(0, row_key=ROW_KEY)
            self._digest.put_blocks(0, 0, 0, block_ids)
            self._digest.compute(0, len(self.prompt))
            self._digest.set_advance(0, 1)
            self._num_computed = len(self.prompt)
        else:
            if self._num_computed == self._num_blocks * BLOCK_SIZE:
                self._num_blocks += 1
                change = scheduler_delta_pb2.BlockChange(append=scheduler_delta_pb2.BlockIds(ids=[self._num_blocks]))
                delta.changes.append(scheduler_delta_pb2.RowChange(req_index=0, blocks=[change]))
                self._digest.put_blocks(0, 0, self._num_blocks - 1, [self._num_blocks])
            self._digest.advance_unmentioned()
            self._num_computed += 1
        delta.state_digest = self._digest.value
        return delta

    def _new_request(self, block_ids: list[int]) -> scheduler_delta_pb2.NewRequest:
        table = scheduler_delta_pb2.BlockChange(replace=scheduler_delta_pb2.BlockIds(ids=block_ids))
        return scheduler_delta_pb2.NewRequest(
            req_index=0,
            row_key=ROW_KEY,
            request_id="one",
            n=1,
            token_ids=self.prompt,
            num_prompt_tokens=len(self.prompt),
            num_prefill_tokens=len(self.prompt),
            num_scheduled_tokens=len(self.prompt),
            blocks=[table],
            sampling=sampling_pb2.RowSampling(temperature=0.0, top_p=1.0, repetition_penalty=1.0),
        )

    def idle(self) -> Delta:
        """Return a step of bookkeeping alone: nobody advances."""
        self.step += 1
        return Delta(step=self.step, mode=Delta.MODE_APPLY_ONLY, state_digest=self._digest.value)


def scripted_tokens(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Return the greedy output of the scripted model, by its definition."""
    h = mix(0x6D616E69)
    for token in prompt:
        h = mix(h ^ mix(token + 1))
    output: list[int] = []
    for _ in range(num_tokens):
        scores = [mix(h ^ mix(token + 0x100000000)) >> 40 for token in range(260)]
        output.append(scores.index(max(scores)))
        h = mix(h ^ mix(output[-1] + 1))
    return output
