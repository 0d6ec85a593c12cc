"""Read everything about a model that is text: tokenizer, chat template, defaults of generation, ids that end it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from control_plane.text.chat_template import ChatTemplate
from control_plane.text.client_templates import ClientTemplates
from control_plane.text.generation_config import generation_faults
from control_plane.text.model_files import TEXT_FILES, DirectoryFiles, ModelFiles
from control_plane.text.scripted_tokenizer import ASSISTANT, CHAT_TEMPLATE, END, SYSTEM, USER
from control_plane.text.tokenizer import Tokenizer
from service_chassis.errors import ConfigurationError, InvalidParameter
from service_chassis.scripted import ScriptedOptions, parse_scripted
from service_chassis.settings import Fault

_SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """What the model's generation_config.json says of sampling. None: it has no opinion."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None

    def to_json(self) -> str:
        """Return what is set as a JSON object, by vLLM's names."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return json.dumps({name: value for name, value in values.items() if value is not None})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelText:
    """The text side of one served model."""

    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    special_tokens: Mapping[str, str]  # bos_token and the like, as templates call them
    defaults: GenerationDefaults
    eos_token_ids: tuple[int, ...]  # ascending; any of them ends the output
    bos_token_id: int | None
    pad_token_id: int | None
    max_model_len: int  # of the configuration; a group may serve less
    architecture: str
    model_type: str
    files: ModelFiles | None  # None: scripted
    client_templates: ClientTemplates = field(default_factory=ClientTemplates, compare=False, repr=False)

    @property
    def directory(self) -> Path | None:
        """Where the model lies on this machine, if it does."""
        return self.files.directory if isinstance(self.files, DirectoryFiles) else None

    def tokenizer_files(self) -> Iterator[tuple[str, bytes]]:
        """Yield (name, content) of the files from which a client builds the same tokenizer."""
        if self.files is not None:
            for name in TEXT_FILES:
                if (content := self.files.read(name)) is not None:
                    yield name, content
            return
        config = {
            "model_type": self.model_type,
            "architectures": [self.architecture],
            "eos_token_id": self.eos_token_ids,
        }
        named = {**self.special_tokens, "tokenizer_class": "PreTrainedTokenizerFast"}
        if self.chat_template is not None:
            named["chat_template"] = self.chat_template.source
        yield "config.json", json.dumps(config).encode()
        yield "tokenizer.json", self.tokenizer.to_json().encode()
        yield "tokenizer_config.json", json.dumps(named).encode()


def load_model_text(model: str) -> ModelText:
    """Read the text side of a model directory, or of a scripted model.

    Raises:
        ConfigurationError: files are missing or wrong; every fault that was found.
        InvalidParameter: the string of a scripted model is wrong.
    """
    options = parse_scripted(model)
    return text_of_files(DirectoryFiles(Path(model))) if options is None else _for_scripted(options)


def _for_scripted(options: ScriptedOptions) -> ModelText:
    tokenizer = Tokenizer.for_scripted(options.vocab or None)
    end = options.vocab[-1] if options.vocab else END
    special_tokens = {"eos_token": end, "pad_token": end}
    # A vocabulary that a test gives can be talked to when it has the tokens of the roles.
    can_chat = None not in [tokenizer.token_id(token) for token in (END, USER, ASSISTANT, SYSTEM)]
    return ModelText(
        tokenizer=tokenizer,
        chat_template=ChatTemplate(CHAT_TEMPLATE, special_tokens) if can_chat else None,
        special_tokens=special_tokens,
        defaults=GenerationDefaults(),
        eos_token_ids=(options.eos_token_id,),
        bos_token_id=None,
        pad_token_id=options.eos_token_id,
        max_model_len=options.max_position,
        architecture="ScriptedForCausalLM",
        model_type="scripted",
        files=None,
    )


def text_of_files(files: ModelFiles) -> ModelText:
    """Read the text side of a model out of its small files.

    Raises:
        ConfigurationError: files are missing or wrong; every fault that was found.
    """
    faults: list[Fault] = []
    config = _read_json(files, "config.json", faults, required=True)
    generation = _read_json(files, "generation_config.json", faults)
    tokenizer_config = _read_json(files, "tokenizer_config.json", faults)
    try:
        tokenizer = Tokenizer.from_files(files)
    except ConfigurationError as error:
        raise ConfigurationError(faults + error.faults) from error
    special_tokens = _special_tokens(tokenizer_config)
    chat_template = _chat_template(files, tokenizer_config, special_tokens, faults)
    text_config = config.get("text_config", config)  # of models that also see
    max_model_len = text_config.get("max_position_embeddings") or text_config.get("n_positions") or 0
    architectures = config.get("architectures") or []
    if not faults and not architectures:
        faults.append(("model", files.path_of("config.json"), "must name the model's class in `architectures`"))
    if not faults and not (isinstance(max_model_len, int) and max_model_len > 0):
        faults.append(("model", files.path_of("config.json"), "must have a positive max_position_embeddings"))
    vocab_size = config.get("vocab_size")
    vocab_size = max(tokenizer.vocab_size, vocab_size) if isinstance(vocab_size, int) else tokenizer.vocab_size
    faults += generation_faults(generation, files.path_of("generation_config.json"), vocab_size)
    if faults:
        raise ConfigurationError(faults)

    def named_id(name: str) -> int | None:
        token = special_tokens.get(name)
        return None if token is None else tokenizer.token_id(token)

    eos_ids = {*_ids(generation.get("eos_token_id")), *_ids(config.get("eos_token_id")), *_ids(named_id("eos_token"))}
    bos_ids = _ids(config.get("bos_token_id")) or _ids(named_id("bos_token"))
    pad_ids = _ids(config.get("pad_token_id")) or _ids(named_id("pad_token"))
    return ModelText(
        tokenizer=tokenizer,
        chat_template=chat_template,
        special_tokens=special_tokens,
        defaults=_defaults(generation),
        eos_token_ids=tuple(sorted(eos_ids)),
        bos_token_id=bos_ids[0] if bos_ids else None,
        pad_token_id=pad_ids[0] if pad_ids else None,
        max_model_len=max_model_len,
        architecture=str(architectures[0]),
        model_type=str(config.get("model_type", "")),
        files=files,
    )


def _read_json(files: ModelFiles, name: str, faults: list[Fault], *, required: bool = False) -> dict[str, Any]:
    path = files.path_of(name)
    try:
        content = files.read(name)
        if content is None:
            if required:
                faults.append(("model", path, "is missing"))
            return {}
        value = json.loads(content.decode())
    except (OSError, ValueError, RecursionError) as error:
        faults.append(("model", path, f"cannot be read as JSON: {error}"))
        return {}
    if not isinstance(value, dict):
        faults.append(("model", path, "must hold a JSON object"))
        return {}
    return value


def _special_tokens(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in _SPECIAL_TOKENS:
        token = tokenizer_config.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            found[name] = token
    return found


def _chat_template(
    files: ModelFiles, tokenizer_config: Mapping[str, Any], special_tokens: Mapping[str, str], faults: list[Fault]
) -> ChatTemplate | None:
    """Find the template where transformers would: a file of its own, else in tokenizer_config.json."""
    name = "chat_template.jinja"
    try:
        content = files.read(name)
        source = tokenizer_config.get("chat_template") if content is None else content.decode()
        if content is None:
            name = "tokenizer_config.json"
        if isinstance(source, list):  # several named ones
            named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
            source = named.get("default")
        return ChatTemplate(source, special_tokens) if isinstance(source, str) else None
    except InvalidParameter as error:
        faults.append(("model", files.path_of(name), error.message))
    except (OSError, ValueError) as error:
        faults.append(("model", files.path_of(name), f"cannot be read as text: {error}"))
    return None


def _ids(value: object) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [one for one in values if isinstance(one, int) and not isinstance(one, bool) and one >= 0]


def _defaults(generation: Mapping[str, Any]) -> GenerationDefaults:
    def number(name: str) -> float | None:
        value = generation.get(name)
        return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None

    top_k, max_tokens = number("top_k"), number("max_new_tokens")
    return GenerationDefaults(
        temperature=number("temperature"),
        top_p=number("top_p"),
        top_k=None if top_k is None else int(top_k),
        min_p=number("min_p"),
        repetition_penalty=number("repetition_penalty"),
        max_tokens=None if max_tokens is None else int(max_tokens),
    )
