"""Other weights for a model, where addresses may change and where they must not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from service_chassis.errors import InvalidParameter
from support.tiny_checkpoints import tiny_config, tiny_tensors, write_checkpoint
from worker_service.models.checkpoint import load_checkpoint
from worker_service.models.config import load_config
from worker_service.models.layers import Placement
from worker_service.models.llama import LlamaModel
from worker_service.sleep.renewal import Anew, InPlace, check_types
from worker_service.sleep.tensors import memory_of, tensors_in

CONFIG = tiny_config("Qwen3ForCausalLM", tie_word_embeddings=True)


def ignore(share: float, what: str) -> None:
    pass


def checkpoint(directory: Path, seed: int, **overrides: Any) -> Path:
    config = {**CONFIG, **overrides}
    return write_checkpoint(directory, config, tiny_tensors(config, seed=seed))


def loaded(directory: Path) -> Any:
    """A model as it is on a device where nothing is packed."""
    model = LlamaModel(load_config(directory), Placement(torch.device("cpu"), torch.float32), 64)
    load_checkpoint(directory, model.slots(), ignored=model.ignores, progress=ignore)
    return model


def assert_holds(model: Any, seed: int) -> None:
    tensors = tiny_tensors(CONFIG, seed=seed)
    for name, slot in model.slots().items():
        assert torch.equal(slot.target, tensors[name]), name


def test_weights_are_replaced_where_they_are_and_only_when_all_were_read(tmp_path: Path) -> None:
    model = loaded(checkpoint(tmp_path / "one", 1))
    addresses = {name: slot.target.data_ptr() for name, slot in model.slots().items()}
    put = InPlace().stage(str(checkpoint(tmp_path / "two", 2)), model, ignore)
    assert_holds(model, 1)
    put()
    assert_holds(model, 2)
    assert {name: slot.target.data_ptr() for name, slot in model.slots().items()} == addresses


def test_what_no_checkpoint_holds_is_kept_over_a_sleep_without_weights(tmp_path: Path) -> None:
    model = loaded(checkpoint(tmp_path / "one", 1))
    of_checkpoint = {memory_of(slot.target) for slot in model.slots().values()}
    kept = InPlace().without_source(model)
    assert {memory_of(tensor) for tensor in tensors_in(model)} == of_checkpoint | {memory_of(one) for one in kept}
    assert kept  # cosines and sines
    assert not of_checkpoint & {memory_of(one) for one in kept}


def test_model_that_becomes_another_stays_the_same_object(tmp_path: Path) -> None:
    model = loaded(checkpoint(tmp_path / "one", 1))
    paths: list[str] = []

    def load(path: str, progress: Any) -> Any:
        paths.append(path)
        return loaded(Path(path))

    put = Anew(load).stage(str(checkpoint(tmp_path / "two", 2)), model, ignore)
    assert_holds(model, 1)
    put()
    assert_holds(model, 2)
    # Another configuration is found before anything of it is read.
    for other in (checkpoint(tmp_path / "three", 2, rope_theta=500.0), checkpoint(tmp_path / "four", 2, head_dim=16)):
        for renewal in (Anew(load), InPlace()):
            with pytest.raises(InvalidParameter, match=r"must have the config\.json of the model that is served"):
                renewal.stage(str(other), model, ignore)
    assert paths == [str(tmp_path / "two")]
    assert_holds(model, 2)


def test_types_are_those_of_the_present_checkpoint_as_long_as_it_is_there(tmp_path: Path) -> None:
    tensors = tiny_tensors(CONFIG, seed=2)
    write_checkpoint(tmp_path / "half", CONFIG, {name: tensor.half() for name, tensor in tensors.items()})
    source = checkpoint(tmp_path / "one", 1)
    assert check_types(str(checkpoint(tmp_path / "two", 2)), str(source)) == len(tensors)
    with pytest.raises(InvalidParameter, match=r"tensor .* must be of type F32, not F16"):
        check_types(str(tmp_path / "half"), str(source))
    assert check_types(str(tmp_path / "half"), str(tmp_path / "gone")) == len(tensors)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize("renewal", [Anew(lambda path, progress: loaded(Path(path))), InPlace()])
def test_weights_that_are_no_numbers_are_refused_before_they_serve(tmp_path: Path, renewal: Any, number: float) -> None:
    model = loaded(checkpoint(tmp_path / "one", 1))
    tensors = tiny_tensors(CONFIG, seed=2)
    tensors["model.layers.1.mlp.down_proj.weight"][3, 5] = number
    other = write_checkpoint(tmp_path / "two", CONFIG, tensors)
    with pytest.raises(InvalidParameter, match="must hold finite numbers alone"):
        renewal.stage(str(other), model, ignore)
    assert_holds(model, 1)
