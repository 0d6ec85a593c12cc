"""Loading weights: exact, in place, and with errors that name the file and the tensor."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from service_chassis.errors import InvalidParameter
from support.tiny_checkpoints import tiny_config, tiny_tensors, write_checkpoint
from worker_service.models.checkpoint import Slot, load_checkpoint
from worker_service.models.layers import Linear
from worker_service.models.registry import load_model
from worker_service.platforms.cpu import CpuPlatform
from worker_service.runner import LoadOptions

CONFIG = tiny_config("LlamaForCausalLM")


def load(directory: Path, slots: dict[str, Slot], *ignored: str) -> list[float]:
    shares: list[float] = []
    load_checkpoint(
        directory, slots, ignored=lambda name: name in ignored, progress=lambda share, what: shares.append(share)
    )
    return shares


def refusal(directory: Path, **options: object) -> str:
    with pytest.raises(InvalidParameter) as caught:
        load_model(
            LoadOptions(model=str(directory), **options),  # type: ignore[arg-type]
            CpuPlatform(1),
            0,
            1,
            lambda share, what: None,
        )
    return caught.value.message


@pytest.mark.parametrize("num_files", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["same", "converted"])
def test_tensors_go_into_their_slots_to_the_bit(tmp_path: Path, num_files: int, dtype: torch.dtype) -> None:
    tensors = tiny_tensors(CONFIG)
    write_checkpoint(tmp_path, CONFIG, tensors, num_files=num_files)
    targets = {name: torch.full_like(tensor, torch.nan, dtype=dtype) for name, tensor in tensors.items()}
    shares = load(tmp_path, {name: Slot(target) for name, target in targets.items()})
    for name, tensor in tensors.items():
        assert torch.equal(targets[name], tensor.to(dtype)), name
    assert shares == sorted(shares)
    assert len(shares) == len(tensors)


def test_a_rank_keeps_its_part(tmp_path: Path) -> None:
    tensors = {"columns": torch.randn(6, 5), "rows": torch.randn(4, 9), "both": torch.randn(3)}
    save_file(tensors, tmp_path / "model.safetensors")
    columns, rows, both = torch.empty(2, 5), torch.empty(4, 3), torch.empty(3)
    load(tmp_path, {"columns": Slot(columns, 0, 1, 3), "rows": Slot(rows, 1, 2, 3), "both": Slot(both)})
    assert torch.equal(columns, tensors["columns"][2:4])
    assert torch.equal(rows, tensors["rows"][:, 6:9])
    assert torch.equal(both, tensors["both"])


def test_a_cut_file_names_itself_and_the_first_tensor_that_is_missing(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CONFIG)
    file = tmp_path / "model.safetensors"
    os.truncate(file, file.stat().st_size - 1000)
    message = refusal(tmp_path)
    assert str(tmp_path) in message
    assert f"{file.name}: tensor " in message
    assert "it is cut off" in message
    header = json.loads(file.read_bytes()[8 : 8 + int.from_bytes(file.read_bytes()[:8], "little")])
    named = message.split("tensor ")[1].split(" ")[0]
    assert 8 + header[named]["data_offsets"][1] > 0


@pytest.mark.parametrize("num_bytes", [0, 5, 8, 100])
def test_a_file_cut_within_its_header_is_said_to_be_cut_off(tmp_path: Path, num_bytes: int) -> None:
    write_checkpoint(tmp_path, CONFIG)
    os.truncate(tmp_path / "model.safetensors", num_bytes)
    assert f"model.safetensors: is cut off: it has {num_bytes} bytes" in refusal(tmp_path)


@pytest.mark.parametrize(("field", "tensor"), [("vocab_size", "model.embed_tokens"), ("intermediate_size", "mlp.")])
def test_a_size_that_the_files_do_not_have_is_refused_before_memory_is_taken(
    tmp_path: Path, field: str, tensor: str
) -> None:
    write_checkpoint(tmp_path, CONFIG)
    size = 10**9 if field == "vocab_size" else 10**7
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {field: size}))  # some 200 GB and 6 GB of weights
    message = refusal(tmp_path)
    assert "model.safetensors: tensor " in message
    assert tensor in message
    assert f"must have shape [{size}, 48], as config.json says" in message


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    tensors = tiny_tensors(CONFIG)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    write_checkpoint(tmp_path, CONFIG, tensors)
    assert "tensor model.layers.1.mlp.up_proj.weight must be in the checkpoint" in refusal(tmp_path)


def test_a_wrong_shape_is_named_with_both_shapes(tmp_path: Path) -> None:
    tensors = tiny_tensors(CONFIG) | {"model.norm.weight": torch.ones(47)}
    write_checkpoint(tmp_path, CONFIG, tensors, num_files=2)
    message = refusal(tmp_path)
    assert "-of-00002.safetensors" in message
    assert "tensor model.norm.weight must have shape [48], as config.json says, not [47]" in message


def test_a_tensor_of_another_model_is_named(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CONFIG, tiny_tensors(CONFIG) | {"model.layers.0.self_attn.sinks": torch.ones(6)})
    assert "tensor model.layers.0.self_attn.sinks must be a tensor of this architecture" in refusal(tmp_path)


def test_old_buffers_and_a_copy_of_the_tied_embedding_are_left_out(tmp_path: Path) -> None:
    config = tiny_config("LlamaForCausalLM", tie_word_embeddings=True)
    more = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16), "lm_head.weight": torch.ones(211, 48)}
    write_checkpoint(tmp_path, config, tiny_tensors(config) | more)
    load_model(LoadOptions(model=str(tmp_path)), CpuPlatform(1), 0, 1, lambda share, what: None)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is cut off"),
        (bytes(64), "a header of 0 bytes"),
        (b"\xff" * 64, "a header of"),
        (b"\x10" + bytes(7) + b"not json at all!", "bad header"),
    ],
)
def test_a_file_that_is_no_safetensors_is_named(tmp_path: Path, content: bytes, said: str) -> None:
    write_checkpoint(tmp_path, CONFIG)
    (tmp_path / "model.safetensors").write_bytes(content)
    message = refusal(tmp_path)
    assert "model.safetensors" in message
    assert said in message


def test_an_index_that_names_a_file_that_is_not_there(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CONFIG, num_files=2)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    message = refusal(tmp_path)
    assert "model-00002-of-00002.safetensors" in message
    assert "does not exist" in message


def test_a_directory_without_weights(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CONFIG)
    (tmp_path / "model.safetensors").unlink()
    assert "must hold model.safetensors or model.safetensors.index.json" in refusal(tmp_path)


def test_a_quantized_tensor_is_named_with_its_type(tmp_path: Path) -> None:
    tensors = tiny_tensors(CONFIG) | {"model.norm.weight": torch.ones(48, dtype=torch.int8)}
    write_checkpoint(tmp_path, CONFIG, tensors)
    assert "tensor model.norm.weight must be of type F64, F32, F16, BF16, not I8" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dtype": "int4"}, "dtype='int4': must be auto or one of float32"),
        ({"max_model_len": 513}, "max_model_len=513: must be at most the model's 512"),
        ({"batch_invariant": True, "block_size": 8}, "multiples of 16"),
    ],
)
def test_options_that_cannot_be_served(tmp_path: Path, options: dict[str, object], said: str) -> None:
    assert said in refusal(write_checkpoint(tmp_path, CONFIG), **options)


def test_sizes_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CONFIG)
    with pytest.raises(InvalidParameter, match="tensor_parallel_size=2: must divide the model's num_kv_heads"):
        load_model(LoadOptions(model=str(tmp_path)), CpuPlatform(1), 0, 2, lambda share, what: None)


def expected_exact(x: Tensor, weight: Tensor) -> Tensor:
    return x.double() @ weight.double().T


def test_highest_scores_of_a_bfloat16_head_are_exact() -> None:
    from worker_service.models.layers import Placement, VocabLinear

    torch.manual_seed(0)
    head = VocabLinear(Placement(torch.device("cpu"), torch.bfloat16), 48, 300, tied_to=None)
    weight = (torch.randn(300, 48) * 2).bfloat16()
    weight[7] = weight[200]  # equal scores; the third differs by less than a step of bfloat16
    weight[9] = weight[200] * torch.where(torch.arange(48) == 5, 1.0078125, 1.0)
    head.weight.copy_(weight)
    x = torch.cat((weight[200:201], torch.randn(3, 48).bfloat16(), torch.zeros(1, 48, dtype=torch.bfloat16)))
    head.pack()
    scores, exact = head.scores(x), expected_exact(x, weight)
    assert scores.dtype is torch.float32
    assert scores.argmax(dim=-1).tolist() == exact.argmax(dim=-1).tolist()
    torch.testing.assert_close(scores.amax(dim=-1).double(), exact.amax(dim=-1), rtol=1e-6, atol=1e-6)


def test_rows_of_an_invariant_linear_have_the_same_bits_in_any_batch() -> None:
    from worker_service.models.layers import Placement

    torch.manual_seed(0)
    linear = Linear(Placement(torch.device("cpu"), torch.float32, batch_invariant=True), 48, 83, bias=True)
    linear.weight.normal_()
    assert linear.bias is not None
    linear.bias.normal_()
    x = torch.randn(150, 48)
    expected = x @ linear.weight.T + linear.bias
    linear.pack()
    whole = linear(x)
    torch.testing.assert_close(whole, expected)
    for start, end in ((0, 1), (5, 36), (149, 150), (10, 74), (1, 140)):
        assert torch.equal(linear(x[start:end]), whole[start:end])
