"""The stock client of KServe's protocol, in threads, against ``maniple serve``: the tokens, and nothing left behind."""

from __future__ import annotations

import json
import queue
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from google.protobuf.json_format import MessageToDict

from maniple_client import Client
from support.scripted_reference import greedy
from support.serve_process import ServeProcess, serving

MODEL = "scripted"
GREEDY = {"temperature": 0, "ignore_eos": True, "skip_special_tokens": False}


@pytest.fixture(scope="module")
def server() -> Iterator[ServeProcess]:
    slow = f"scripted:{json.dumps({'step_time_s': 0.002})}"
    with serving("--model", slow, "--num-kv-blocks", "200", "--served-model-name", MODEL) as one:
        assert one.address
        yield one


def inputs(text: str, sampling: dict[str, Any], **switches: bool) -> list[triton.InferInput]:
    tensors = []
    for name, value in {"text_input": text, "sampling_parameters": json.dumps({**GREEDY, **sampling})}.items():
        tensors.append(triton.InferInput(name, [1], "BYTES"))
        tensors[-1].set_data_from_numpy(np.array([value], dtype=object))
    for name, switch in switches.items():
        tensors.append(triton.InferInput(name, [1], "BOOL"))
        tensors[-1].set_data_from_numpy(np.array([switch]))
    return tensors


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 15
    while not condition():
        assert time.monotonic() < deadline, f"waited for: {what}"
        time.sleep(0.01)


class Answers:
    """What the callback of a stream heard, by the id of the request."""

    def __init__(self) -> None:
        self.queue: queue.Queue[tuple[Any, Any]] = queue.Queue()

    def __call__(self, result: Any, error: Any) -> None:
        self.queue.put((result, error))

    def next(self) -> Any:
        result, error = self.queue.get(timeout=20)
        assert error is None, error
        return result


def test_streamed_requests_get_the_models_tokens_side_by_side_and_its_log_probabilities(server: ServeProcess) -> None:
    prompts = {str(k): f"ave {k}" for k in range(5)}
    heard = Answers()
    with triton.InferenceServerClient(server.address) as client:
        client.start_stream(heard)
        for request_id, text in prompts.items():
            tensors = inputs(text, {"max_tokens": 12, "logprobs": 2}, stream=True)
            client.async_stream_infer(MODEL, tensors, request_id=request_id, enable_empty_final_response=True)
        tokens: dict[str, list[dict[str, Any]]] = {request_id: [] for request_id in prompts}
        cumulative: dict[str, float] = {}
        left = set(prompts)
        while left:
            result = heard.next()
            response = result.get_response()
            tokens[response.id] += json.loads(result.as_numpy("logprobs")[0])
            cumulative[response.id] = float(result.as_numpy("cumulative_logprob")[0])
            if response.parameters["triton_final_response"].bool_param:
                left.remove(response.id)
        client.stop_stream()
    for request_id, text in prompts.items():
        likeliest = [min(told.items(), key=lambda one: one[1]["rank"]) for told in tokens[request_id]]
        assert [int(token_id) for token_id, _ in likeliest] == greedy(list(text.encode()), 12)
        total = sum(told["logprob"] for _, told in likeliest)
        assert cumulative[request_id] == pytest.approx(total, abs=1e-4)
        assert [len(told) for told in tokens[request_id]] == [2] * 12  # the sampled one is among the two likeliest


def test_unary_request_gets_the_models_tokens(server: ServeProcess) -> None:
    with triton.InferenceServerClient(server.address) as client, Client(server.address) as ours:
        result = client.infer(MODEL, inputs("salve", {"max_tokens": 9}), client_timeout=20)
        expected = ours.generate("salve", max_tokens=9, skip_special_tokens=False, temperature=0, ignore_eos=True)
        assert result.as_numpy("text_output")[0].decode() == "salve" + expected.text()
        assert expected.transcript.samples[0].token_ids == greedy(list(b"salve"), 9)


def test_constraint_of_the_output_goes_under_either_of_vllms_names(server: ServeProcess) -> None:
    with triton.InferenceServerClient(server.address) as client:
        for name, constraint in (
            ("structured_outputs", {"choice": ["veni", "vidi"]}),
            ("guided_decoding", {"json": {"enum": [17, "vici"]}}),
        ):
            tensors = inputs("?", {"ignore_eos": False, name: constraint}, exclude_input_in_output=True)
            result = client.infer(MODEL, tensors, client_timeout=30)
            assert result.as_numpy("text_output")[0].decode() in ("veni", "vidi", "17", '"vici"')
            assert result.as_numpy("finish_reason")[0] == b"stop"


def test_cancelled_stream_and_passed_timeout_free_every_block(server: ServeProcess) -> None:
    with Client(server.address) as ours:

        def free_blocks() -> int:
            (group,) = ours.status().groups
            return group.num_free_blocks + group.num_cached_blocks if not group.num_running + group.num_waiting else -1

        before = free_blocks()
        assert before == 199
        heard = Answers()
        with triton.InferenceServerClient(server.address) as client:
            client.start_stream(heard)
            for k in range(4):
                client.async_stream_infer(
                    MODEL, inputs(f"ave {k}", {"max_tokens": 3000}, stream=True), request_id=str(k)
                )
            while {heard.next().get_response().id for _ in range(20)} != {"0", "1", "2", "3"}:
                pass
            assert free_blocks() == -1
            client.stop_stream(cancel_requests=True)
            until(lambda: free_blocks() == before, "the blocks of the stream are free")
            client.start_stream(heard := Answers())
            client.async_stream_infer(MODEL, inputs("ave", {"max_tokens": 3000}), request_id="late", timeout=50_000)
            result, error = heard.queue.get(timeout=20)
            assert result is None
            assert "DEADLINE_EXCEEDED" in str(error)
            until(lambda: free_blocks() == before, "the blocks of the late request are free")
            client.async_stream_infer(MODEL, inputs("ave", {"max_tokens": 2}), request_id="next")
            assert heard.next().get_response().id == "next"
            client.stop_stream()


def test_service_is_listed_and_has_a_health_of_its_own(server: ServeProcess) -> None:
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc
    from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

    with grpc.insecure_channel(server.address) as channel:
        assert "inference.GRPCInferenceService" in ProtoReflectionDescriptorDatabase(channel).get_services()
        asked = health_pb2.HealthCheckRequest(service="inference.GRPCInferenceService")
        told = health_pb2_grpc.HealthStub(channel).Check(asked, timeout=10)
        assert MessageToDict(told) == {"status": "SERVING"}
