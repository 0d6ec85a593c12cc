"""What is read of a model beside its weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from control_plane.text.model_text import load_model_text
from control_plane.text.tokenizer import Tokenizer
from service_chassis.errors import ConfigurationError, InvalidParameter
from support.demo_model import demo_directory


def write_model(directory: Path, **files: object) -> Path:
    """A directory with a byte tokenizer; a file given as None is left out, one given as text is written as it is."""
    content: dict[str, object] = {
        "config": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "max_position_embeddings": 64},
        **files,
    }
    for name, value in content.items():
        if value is not None:
            text = value if isinstance(value, str) else json.dumps(value)
            (directory / f"{name}.json").write_text(text)
    if "tokenizer" not in files:
        (directory / "tokenizer.json").write_text(Tokenizer.for_scripted().to_json())
    return directory


def test_demo_chat_is_rendered_as_by_transformers() -> None:
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast.from_pretrained(demo_directory())
    ours = load_model_text(str(demo_directory()))
    assert ours.chat_template is not None
    conversation = [
        {"role": "user", "content": "Hi <there>"},
        {"role": "assistant", "content": "Well…"},
        {"role": "user", "content": "go on"},
    ]
    for messages in (conversation[:1], conversation, [{"role": "system", "content": "Be brief."}, *conversation]):
        text = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert ours.chat_template.render(messages) == text
        ids = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert ours.tokenizer.encode(str(text), add_special_tokens=False) == ids


def test_demo_model_is_described() -> None:
    text = load_model_text(str(demo_directory()))
    # SmolLM2-135M-Instruct: <|im_start|> is 1, <|im_end|> is 2.
    assert (text.architecture, text.model_type, text.max_model_len) == ("LlamaForCausalLM", "llama", 8192)
    assert (text.eos_token_ids, text.bos_token_id, text.pad_token_id) == ((2,), 1, 2)
    assert text.tokenizer.vocab_size == 49152


def test_end_of_text_is_the_union_of_what_the_files_say(tmp_path: Path) -> None:
    config = {"architectures": ["X"], "max_position_embeddings": 8, "eos_token_id": [7]}
    model = write_model(
        tmp_path,
        config=config,
        generation_config={"eos_token_id": [9, 5]},
        tokenizer_config={"eos_token": {"content": "<|end|>"}},
    )
    assert load_model_text(str(model)).eos_token_ids == (5, 7, 9, 256)


def test_generation_config_gives_the_defaults(tmp_path: Path) -> None:
    generation = {"temperature": 0.6, "top_p": 0.9, "top_k": 40, "repetition_penalty": 1.1, "max_new_tokens": 99}
    defaults = load_model_text(str(write_model(tmp_path, generation_config=generation))).defaults
    assert json.loads(defaults.to_json()) == {
        "temperature": 0.6,
        "top_p": 0.9,
        "top_k": 40,
        "repetition_penalty": 1.1,
        "max_tokens": 99,
    }


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("temperature", "hot", "must be a number"),
        ("temperature", -1, "must be a finite number, at least 0"),
        ("temperature", float("nan"), "must be a finite number, at least 0"),
        ("top_p", -3, "must be above 0 and at most 1"),
        ("top_p", True, "must be a number"),
        ("min_p", 1.5, "must be in [0, 1]"),
        ("top_k", 2.5, "must be a whole number"),
        ("top_k", 2**40, "must be in [-1, 2147483647]"),
        ("repetition_penalty", 0, "must be in [0.01, 10]"),
        ("max_new_tokens", 0, "must be in [1, 2147483647]"),
        ("eos_token_id", 260, "must be a token id, or a list of them, in [0, 260)"),
        ("eos_token_id", [1, -1], "must be a token id, or a list of them, in [0, 260)"),
        ("eos_token_id", "<|end|>", "must be a token id, or a list of them, in [0, 260)"),
    ],
)
def test_a_wrong_default_is_the_models_fault_and_told_at_the_start(
    tmp_path: Path, name: str, value: object, rule: str
) -> None:
    model = write_model(tmp_path, generation_config={name: value, "do_sample": "whatever"})
    with pytest.raises(ConfigurationError) as caught:
        load_model_text(str(model))
    assert caught.value.faults == [("model", str(model / "generation_config.json"), f"{name} {value!r} {rule}")]


def test_a_default_of_null_is_none(tmp_path: Path) -> None:
    generation = {"temperature": None, "top_k": 50.0, "eos_token_id": None}
    assert load_model_text(str(write_model(tmp_path, generation_config=generation))).defaults.to_json() == (
        '{"top_k": 50}'
    )


@pytest.mark.parametrize("named", ["file", "string", "list"])
def test_template_is_found_where_transformers_looks(tmp_path: Path, named: str) -> None:
    template = "{{ messages[0].content }}"
    config: dict[str, object] = {"chat_template": "not this one"}
    if named == "file":
        (tmp_path / "chat_template.jinja").write_text(template)
    elif named == "string":
        config = {"chat_template": template}
    else:
        entries = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": template}]
        config = {"chat_template": entries}
    text = load_model_text(str(write_model(tmp_path, tokenizer_config=config)))
    assert text.chat_template is not None
    assert text.chat_template.render([{"role": "user", "content": "it"}]) == "it"


def test_model_without_a_template_has_none(tmp_path: Path) -> None:
    assert load_model_text(str(write_model(tmp_path))).chat_template is None


def test_faults_of_a_directory_are_reported_all_at_once(tmp_path: Path) -> None:
    model = write_model(tmp_path, config="{", generation_config="[]", tokenizer=None)
    with pytest.raises(ConfigurationError) as caught:
        load_model_text(str(model))
    named = [Path(str(value)).name for _, value, _ in caught.value.faults]
    assert named == ["config.json", "generation_config.json", tmp_path.name]


@pytest.mark.parametrize(
    ("config", "said"),
    [({"max_position_embeddings": 8}, "architectures"), ({"architectures": ["X"]}, "max_position_embeddings")],
)
def test_incomplete_config_is_refused(tmp_path: Path, config: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        load_model_text(str(write_model(tmp_path, config=config)))


def test_broken_template_is_named(tmp_path: Path) -> None:
    model = write_model(tmp_path, tokenizer_config={"chat_template": "{% if %}"})
    with pytest.raises(ConfigurationError, match="chat_template"):
        load_model_text(str(model))


def test_scripted_model_with_a_vocabulary_chats_only_with_the_tokens_of_the_roles() -> None:
    assert load_model_text('scripted:{"vocab": ["a", "b"]}').chat_template is None
    roles = ["a", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"]
    text = load_model_text(f"scripted:{json.dumps({'vocab': roles})}")
    assert text.chat_template is not None
    rendered = text.chat_template.render([{"role": "user", "content": "aa"}])
    assert text.tokenizer.encode(rendered) == [1, 0, 0, 4, 2]
    assert text.eos_token_ids == (4,)


def test_wrong_scripted_string_is_refused() -> None:
    with pytest.raises(InvalidParameter, match="model"):
        load_model_text("scripted:{")
