"""Resolve and check sampling parameters, for every door, in this one place.

The neutral form is ``maniple.v1.SamplingParams``, where unset is distinct from zero; other doors translate into it.
Unset values come from the model's generation config, then from the defaults that sampling.proto documents.
"""

from __future__ import annotations

from collections.abc import Callable

from control_plane.doors.constraint_rules import resolve_constraint
from control_plane.doors.limits import check_count, check_number, check_token_ids
from control_plane.generation import SamplingChoice, TextChoice
from control_plane.text.model_text import ModelText
from control_plane.text.tokenizer import Tokenizer
from maniple.v1.sampling_pb2 import LogprobsMode, SamplingParams
from service_chassis.errors import InvalidParameter

MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 256
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 128
MAX_ALLOWED_TOKEN_IDS = 2**18
MIN_REPETITION_PENALTY = 0.01
MAX_SAMPLES = 64
MAX_LOGPROBS = 20
# What clients take in one message unless told otherwise is 4 MiB; the rest is for what else a message holds.
MAX_LOGPROBS_BYTES = 3 << 20


def resolve_sampling(
    wanted: SamplingParams, model: ModelText, *, vocab_size: int, room: int, draw_seed: Callable[[], int]
) -> SamplingChoice:
    """Return the choice with every default resolved.

    Args:
        wanted: what the client wrote.
        model: its generation defaults and end-of-text ids.
        vocab_size: ids are below this.
        room: tokens that fit behind the prompt, at least 1; ``max_tokens`` is clipped to it.
        draw_seed: called where the client gave no seed.
    Raises:
        InvalidParameter: a value is out of its range.
    """
    defaults = model.defaults

    def value(field: str, default: float | None, otherwise: float) -> float:
        if wanted.HasField(field):  # type: ignore[arg-type]  # the names below are fields
            return float(getattr(wanted, field))
        return otherwise if default is None else default

    temperature = check_number("temperature", value("temperature", defaults.temperature, 1.0), 0.0)
    top_p = check_number("top_p", value("top_p", defaults.top_p, 1.0), 0.0, 1.0, above_low=True)
    top_k = int(check_number("top_k", value("top_k", defaults.top_k, 0), -1))
    min_p = check_number("min_p", value("min_p", defaults.min_p, 0.0), 0.0, 1.0)
    repetition = value("repetition_penalty", defaults.repetition_penalty, 1.0)
    check_number("repetition_penalty", repetition, MIN_REPETITION_PENALTY, 10.0)
    presence = check_number("presence_penalty", value("presence_penalty", None, 0.0), -2.0, 2.0)
    frequency = check_number("frequency_penalty", value("frequency_penalty", None, 0.0), -2.0, 2.0)
    n = int(check_number("n", value("n", None, 1), 1, MAX_SAMPLES))

    max_tokens = int(check_number("max_tokens", value("max_tokens", defaults.max_tokens, room), 1))
    if wanted.HasField("max_tokens") and wanted.min_tokens > max_tokens:
        raise InvalidParameter("min_tokens", wanted.min_tokens, f"must be at most max_tokens, {max_tokens}")
    max_tokens = min(max_tokens, room)
    min_tokens = min(wanted.min_tokens, max_tokens)

    check_count("stop_token_ids", wanted.stop_token_ids, MAX_STOP_TOKEN_IDS)
    check_token_ids("stop_token_ids", wanted.stop_token_ids, vocab_size)
    stop_token_ids = frozenset(wanted.stop_token_ids)
    constraint = resolve_constraint(wanted)
    # An output that must match something ends where it has to, whoever wants to ignore it.
    has_eos = constraint is not None or not wanted.ignore_eos
    eos_ids = frozenset(one for one in model.eos_token_ids if one < vocab_size and has_eos)
    bad_words = _bad_words(wanted, model.tokenizer)
    allowed = tuple(sorted(set(wanted.allowed_token_ids)))
    check_count("allowed_token_ids", allowed, MAX_ALLOWED_TOKEN_IDS)
    check_token_ids("allowed_token_ids", allowed, vocab_size)
    never = {word[0] for word in bad_words if len(word) == 1}
    never |= eos_ids | stop_token_ids if min_tokens else set()
    if never.issuperset(allowed or range(vocab_size)):
        field, ids = ("allowed_token_ids", allowed) if allowed else ("stop_token_ids", stop_token_ids)
        raise InvalidParameter(field, sorted(ids), "must leave an id that bad_words and min_tokens do not forbid")

    if wanted.logprobs_mode not in LogprobsMode.values():
        raise InvalidParameter("logprobs_mode", wanted.logprobs_mode, "must be one of LogprobsMode")

    return SamplingChoice(
        temperature=temperature,
        top_p=top_p,
        top_k=0 if top_k <= 0 or top_k >= vocab_size else top_k,
        min_p=min_p,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        seed=wanted.seed if wanted.HasField("seed") else draw_seed(),
        n=n,
        eos_ids=eos_ids,
        stop_token_ids=stop_token_ids,
        constraint=constraint,
        ignores_eos=wanted.ignore_eos and constraint is not None,
        logit_bias=_logit_bias(wanted, vocab_size),
        allowed_token_ids=allowed,
        bad_words=bad_words,
        num_logprobs=_num_logprobs("logprobs", wanted, vocab_size),
        num_prompt_logprobs=_num_logprobs("prompt_logprobs", wanted, vocab_size),
        logprobs_mode=wanted.logprobs_mode,
    )


def room_for_logprobs(wanted: SamplingParams, *, num_prompt_tokens: int, room: int, only_final: bool) -> int:
    """Return how many tokens the output may have, so that messages hold what was asked of the tokens.

    Chunks are cut as needed; what is told of a prompt, and with ``only_final`` of an output, goes in one message.

    Args:
        wanted: what the client wrote.
        num_prompt_tokens: of its prompt.
        room: tokens that fit behind the prompt otherwise, at least 1.
        only_final: the whole output is one message.
    Raises:
        InvalidParameter: it does not fit.
    """
    for field in ("logprobs", "prompt_logprobs"):
        check_number(field, getattr(wanted, field), 0, MAX_LOGPROBS)
    num_left = MAX_LOGPROBS_BYTES
    if wanted.HasField("prompt_logprobs"):
        most = num_left // _bytes_per_token(wanted.prompt_logprobs)
        if num_prompt_tokens > most:
            rule = f"of a prompt of {num_prompt_tokens} tokens do not fit into one message: of {most} they do"
            raise InvalidParameter("prompt_logprobs", wanted.prompt_logprobs, rule)
        num_left -= num_prompt_tokens * _bytes_per_token(wanted.prompt_logprobs)
    if wanted.HasField("logprobs") and only_final:
        most = num_left // _bytes_per_token(wanted.logprobs)
        num_tokens = min(wanted.max_tokens, room) if wanted.HasField("max_tokens") else 1
        if num_tokens > most:
            rule = f"of max_tokens {wanted.max_tokens} do not fit into the one message of only_final: of {most} they do"
            raise InvalidParameter("logprobs", wanted.logprobs, rule)
        return min(room, most)
    return room


def _bytes_per_token(num_likeliest: int) -> int:
    """Return what a position takes in a message at most: ids of 3 bytes, values of 4, and what frames them."""
    return 13 + 7 * (num_likeliest + 1)


def _num_logprobs(field: str, wanted: SamplingParams, vocab_size: int) -> int | None:
    if not wanted.HasField(field):  # type: ignore[arg-type]  # the names given are fields
        return None
    return min(int(check_number(field, getattr(wanted, field), 0, MAX_LOGPROBS)), vocab_size)


def resolve_text(wanted: SamplingParams, *, skip_text: bool) -> TextChoice:
    """Return how ids become text. Raises ``InvalidParameter``."""
    check_count("stop", wanted.stop, MAX_STOP_STRINGS)
    for stop in wanted.stop:
        if not stop:
            raise InvalidParameter("stop", stop, "must not be empty")
        if len(stop.encode()) > MAX_STOP_BYTES:
            raise InvalidParameter("stop", stop, f"must have at most {MAX_STOP_BYTES} bytes")
    return TextChoice(
        stop=tuple(dict.fromkeys(wanted.stop)),
        include_stop_str_in_output=wanted.include_stop_str_in_output,
        skip_special_tokens=wanted.skip_special_tokens if wanted.HasField("skip_special_tokens") else True,
        spaces_between_special_tokens=(
            wanted.spaces_between_special_tokens if wanted.HasField("spaces_between_special_tokens") else True
        ),
        skip_text=skip_text,
    )


def _logit_bias(wanted: SamplingParams, vocab_size: int) -> tuple[tuple[int, float], ...]:
    if len(wanted.logit_bias) > MAX_LOGIT_BIAS:
        raise InvalidParameter("logit_bias", f"{len(wanted.logit_bias)} entries", f"may have at most {MAX_LOGIT_BIAS}")
    check_token_ids("logit_bias", wanted.logit_bias, vocab_size)
    for bias in wanted.logit_bias.values():
        check_number("logit_bias", bias, -100.0, 100.0)
    return tuple(sorted(wanted.logit_bias.items()))


def _bad_words(wanted: SamplingParams, tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Return the ways a word is written in tokens: at the beginning of a text, and behind a space."""
    check_count("bad_words", wanted.bad_words, MAX_BAD_WORDS)
    written: dict[tuple[int, ...], None] = {}
    for word in wanted.bad_words:
        if not word.strip():
            raise InvalidParameter("bad_words", word, "must not be empty")
        if len(word.encode()) > MAX_STOP_BYTES:
            raise InvalidParameter("bad_words", word, f"must have at most {MAX_STOP_BYTES} bytes")
        for text in (word, " " + word.lstrip()):
            try:
                written[tuple(tokenizer.encode(text, add_special_tokens=False))] = None
            except InvalidParameter:
                continue  # no tokens write it, so no output can hold it
    return tuple(token_ids for token_ids in written if token_ids)
