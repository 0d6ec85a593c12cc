"""Answer Sleep, WakeUp and UpdateWeights on one rank: each is long work between steps, visibly busy."""

from __future__ import annotations

from maniple.v1 import worker_pb2
from service_chassis.errors import InvalidParameter
from service_chassis.sleep_tags import DEEPEST_SLEEP, MEMORY_TAGS
from service_chassis.telemetry import get_logger
from worker_service.runner import ModelRunner, Progress
from worker_service.stages import Stages
from worker_service.step_loop import StepLoop
from worker_service.steps import Steps

Phase = worker_pb2.WorkerServiceUpdateWeightsRequest.Phase


class Dormancy:
    """What of this rank sleeps, and which weights it has. All methods run on the event loop."""

    def __init__(self, stages: Stages, steps: Steps, step_loop: StepLoop) -> None:
        self._stages = stages
        self._steps = steps
        self._step_loop = step_loop
        self._staged_path = ""  # of weights that were read and wait for COMMIT

    async def sleep(self, request: worker_pb2.WorkerServiceSleepRequest) -> worker_pb2.WorkerServiceSleepResponse:
        """Give memory back. What sleeps already stays as it is."""
        if not 1 <= request.level <= DEEPEST_SLEEP:
            raise InvalidParameter("level", request.level, f"must be from 1 to {DEEPEST_SLEEP}")

        def sleep(runner: ModelRunner, _: Progress) -> tuple[int, int]:
            try:
                return runner.sleep(request.level), runner.taken_bytes()
            finally:
                self._steps.asleep = runner.asleep  # before anything else is taken from the queue

        work = self._stages.between_steps("sleep", request.epoch, request.after_step, sleep)
        freed_bytes, taken_bytes = await work
        get_logger().info(
            "rank.slept",
            level=request.level,
            asleep=sorted(self._steps.asleep),
            freed_bytes=freed_bytes,
            taken_bytes=taken_bytes,
        )
        return worker_pb2.WorkerServiceSleepResponse(freed_bytes=freed_bytes, taken_bytes=taken_bytes)

    async def wake_up(self, request: worker_pb2.WorkerServiceWakeUpRequest) -> worker_pb2.WorkerServiceWakeUpResponse:
        """Take memory again. What is awake stays as it is."""
        for tag in request.tags:
            if tag not in MEMORY_TAGS:
                raise InvalidParameter("tags", tag, f"must be one of {', '.join(MEMORY_TAGS)}")

        def wake_up(runner: ModelRunner, progress: Progress) -> int:
            try:
                runner.wake_up(request.tags, progress)
            finally:
                self._steps.asleep = runner.asleep
            return runner.taken_bytes()

        taken_bytes = await self._stages.between_steps("wake up", request.epoch, request.after_step, wake_up)
        get_logger().info("rank.woke_up", asleep=sorted(self._steps.asleep), taken_bytes=taken_bytes)
        return worker_pb2.WorkerServiceWakeUpResponse(taken_bytes=taken_bytes)

    async def update_weights(
        self, request: worker_pb2.WorkerServiceUpdateWeightsRequest
    ) -> worker_pb2.WorkerServiceUpdateWeightsResponse:
        """Do one phase of an update."""
        if request.phase not in Phase.values():
            raise InvalidParameter("phase", request.phase, f"must be one of {', '.join(Phase.keys())}")

        def update(runner: ModelRunner, progress: Progress) -> tuple[int, int]:
            num_tensors = 0
            if request.phase == worker_pb2.WorkerServiceUpdateWeightsRequest.PHASE_COMMIT:
                runner.put_staged_weights()
                self._steps.asleep = runner.asleep
                self._stages.weights_path = self._staged_path
            elif request.phase == worker_pb2.WorkerServiceUpdateWeightsRequest.PHASE_ABANDON:
                runner.unstage_weights()
            else:
                num_tensors = runner.stage_weights(request.path, progress)
                self._staged_path = request.path
            return num_tensors, runner.taken_bytes()

        work = self._stages.between_steps("update weights", request.epoch, request.after_step, update)
        num_tensors, taken_bytes = await work
        get_logger().info("weights.updated", phase=Phase.Name(request.phase), path=self._staged_path)
        return worker_pb2.WorkerServiceUpdateWeightsResponse(num_tensors=num_tensors, taken_bytes=taken_bytes)

    def lose_owner(self) -> None:
        """Let go of weights that an owner had this rank read and will not put in place any more."""
        runner = self._step_loop.runner
        if self._staged_path and runner is not None:
            self._step_loop.call(runner.unstage_weights)
