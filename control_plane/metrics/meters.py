"""What a control plane counts where it happens, ready at hand: looking a counter up by its labels is for once."""

from __future__ import annotations

from control_plane.group.loss import LossReason
from control_plane.group.settings import GroupFacts
from control_plane.live_request import LiveRequest
from control_plane.metrics.loss_causes import CAUSES, cause_of
from control_plane.metrics.table import FINISHED_REASONS, METRICS, PHASES
from maniple.v1 import errors_pb2
from service_chassis.errors import ManipleError, reason_name
from service_chassis.metrics import Board


class GroupMeters:
    """Counts of one group, over all its lives. Event loop."""

    def __init__(self, board: Board, model_name: str, name: str) -> None:
        """Show every counter from now on, as 0."""
        self._board = board
        self._labels = labels = (model_name, name)
        self.phases = {phase: board.distribution("maniple_step_phase_seconds", *labels, phase) for phase in PHASES}
        self.steps = {mode: board.count("maniple_steps_total", *labels, mode) for mode in ("run", "apply_only")}
        self.delta_bytes = board.distribution("maniple_delta_bytes", *labels)
        self.iteration_tokens = board.distribution("vllm:iteration_tokens_total", *labels)
        self.prompt_tokens = board.count("vllm:prompt_tokens_total", *labels)
        self.output_tokens = board.count("vllm:generation_tokens_total", *labels)
        self.time_to_first_token = board.distribution("vllm:time_to_first_token_seconds", *labels)
        self.inter_token_latency = board.distribution("vllm:inter_token_latency_seconds", *labels)
        self.queue_time = board.distribution("vllm:request_queue_time_seconds", *labels)
        self.suspicions = board.count("maniple_watchdog_suspicions_total", *labels)
        self.moved = board.count("maniple_requests_moved_total", *labels)
        self._of_requests = {
            name: board.distribution(f"vllm:{name}", *labels)
            for name in (
                "e2e_request_latency_seconds",
                "request_prefill_time_seconds",
                "request_decode_time_seconds",
                "request_inference_time_seconds",
                "request_time_per_output_token_seconds",
                "request_prompt_tokens",
                "request_generation_tokens",
            )
        }
        self._finished = {
            reason: board.count("vllm:request_success_total", *labels, reason) for reason in FINISHED_REASONS
        }
        for error in (errors_pb2.ERROR_REASON_INTERNAL, errors_pb2.ERROR_REASON_GROUP_LOST):
            board.count("maniple_requests_failed_total", *labels, reason_name(error))  # alerts ask for the first one
        self._losses = {cause: board.count("maniple_group_losses_total", *labels, cause) for cause in CAUSES}
        self._formed = board.distribution("maniple_formation_seconds", *labels)
        self._taken_over = board.distribution("maniple_takeover_seconds", *labels)

    def came_to_life(self, facts: GroupFacts, *, with_batch: bool) -> None:
        """Note that the group was formed, or taken over with what runs in it."""
        (self._taken_over if with_batch else self._formed).observe(facts.formed_in_s)

    def lost(self, loss: LossReason) -> None:
        """Note its end."""
        self._losses[cause_of(loss)].add()

    def request_ended(self, live: LiveRequest, error: ManipleError | None, now: float) -> None:
        """Note the end of a request. What ended in an error is counted, and none of its times."""
        if error is not None:
            self._board.count("maniple_requests_failed_total", *self._labels, reason_name(error.reason)).add()
            return
        reason = live.samples[0].reason
        if reason is not None and reason.value in self._finished:
            self._finished[reason.value].add()
        of = self._of_requests
        of["e2e_request_latency_seconds"].observe(now - live.arrived_at)
        of["request_prompt_tokens"].observe(len(live.generation.prompt_token_ids))
        num_tokens = live.num_output_tokens
        of["request_generation_tokens"].observe(num_tokens)
        if live.started_at is None:
            return
        of["request_inference_time_seconds"].observe(now - live.started_at)
        if live.first_token_at is None:
            return
        of["request_prefill_time_seconds"].observe(live.first_token_at - live.started_at)
        of["request_decode_time_seconds"].observe(decode_s := now - live.first_token_at)
        if num_tokens > 1:
            of["request_time_per_output_token_seconds"].observe(decode_s / (num_tokens - 1))


class Meters:
    """Counts of the whole control plane."""

    def __init__(self, model_name: str) -> None:
        """Begin with nothing counted."""
        self.board = Board(METRICS)
        self._model_name = model_name
        self._groups: dict[str, GroupMeters] = {}

    def group(self, name: str) -> GroupMeters:
        """Return the counts of one group, the same for all its lives."""
        if name not in self._groups:
            self._groups[name] = GroupMeters(self.board, self._model_name, name)
        return self._groups[name]
