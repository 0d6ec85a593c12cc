"""What doors and engine say to each other about one generation. Plain values, no proto, no grpc."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from control_plane.structured_output.constraint import Constraint
from service_chassis.ids import RequestId
from service_chassis.protocol.logprobs import Logprobs

# Below this temperature the highest score wins.
GREEDY_BELOW = 1e-5


class FinishReason(Enum):
    """Why a sample ended well. Anything else ends the request with an error."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingChoice:
    """Sampling of one request with every default resolved and every value checked. Ranges: sampling.proto.

    ``stop_ids`` holds what ends a row on the token level: end-of-text ids (unless ``ignore_eos``) and stop_token_ids.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    max_tokens: int = 16
    min_tokens: int = 0
    seed: int = 0  # drawn where the client gave none
    n: int = 1
    eos_ids: frozenset[int] = frozenset()  # empty with ignore_eos
    stop_token_ids: frozenset[int] = frozenset()
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    logprobs_mode: int = 0
    # What the output must match. With it `eos_ids` are always set, since it ends where it must, and `ignores_eos` says
    # whether it ends earlier where it may.
    constraint: Constraint | None = None
    ignores_eos: bool = False

    def beyond_plain(self) -> tuple[str, object] | None:
        """Return the first parameter, with its value, that asks for more than greedy or seeded draws; None if none."""
        plain = SamplingChoice()
        filters = () if self.temperature < GREEDY_BELOW else ("top_p", "top_k", "min_p")
        penalties = ("repetition_penalty", "presence_penalty", "frequency_penalty")
        for name in (*filters, *penalties, "logit_bias", "allowed_token_ids", "bad_words"):
            if getattr(self, name) != getattr(plain, name):
                return name, getattr(self, name)
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class TextChoice:
    """How output ids become text."""

    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True  # where the tokenizer puts any, and the tokens are shown
    skip_text: bool = False  # ids only; no detokenizer runs unless there are stop strings


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingChoice:
    """How a prompt becomes one vector."""

    is_mean: bool = False  # of all its tokens' hidden states; else the last token's
    normalize: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One admitted-to-be request, checked by its door against the model and the limits."""

    request_id: RequestId
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingChoice
    text: TextChoice = TextChoice()
    priority: int = 0  # lower first
    cache_namespace: bytes = b""
    skip_reading_prefix_cache: bool = False
    deadline: float | None = None  # on the engine's monotonic clock
    group: int | None = None  # which group has to compute it; None: whichever suits it
    detach_grace_s: float = 0.0  # how long it goes on without a stream; 0: a broken stream ends it
    only_final: bool = False  # its client wants whole outputs, no chunks
    client_resumes: bool = False  # its client can take it up elsewhere; else a handover reads on for it
    client_identity: str = ""  # as authentication knows the caller; empty without
    traceparent: str = ""
    pooling: PoolingChoice | None = None  # set: its only output is a vector, nothing is sampled

    @property
    def prompt_entries(self) -> int:
        """Log-probabilities that each token of its prompt comes with."""
        asked = self.sampling.num_prompt_logprobs
        return 0 if asked is None else asked + 1

    @property
    def reads_prefix_cache(self) -> bool:
        """Whether it may use what others computed. Nobody can say any more what that said of a prompt's tokens."""
        return not self.skip_reading_prefix_cache and self.sampling.num_prompt_logprobs is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """What a client that resumes already has of one sample."""

    index: int
    num_tokens: int = 0
    num_text_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The request entered its first delta."""

    request_id: RequestId
    resume_token: str = field(repr=False)  # a secret; empty where nothing is left to resume once the stream broke
    num_prompt_tokens: int
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class Waiting:
    """Nothing happened for a while. At any place before the last event."""


@dataclass(slots=True, kw_only=True)
class Chunk:
    """New output of one sample; chunks that nobody took yet are merged."""

    index: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: Logprobs | None = None  # a position a token, where asked for

    def add(self, other: Chunk) -> None:
        """Take in what comes next of the same sample."""
        self.token_ids += other.token_ids
        self.text += other.text
        if other.logprobs is not None:
            if self.logprobs is None:
                self.logprobs = Logprobs(other.logprobs.width)
            self.logprobs.extend(other.logprobs)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLogprobs:
    """What was asked of the prompt: a position a token. Before the first chunk; after it only behind a handover."""

    columns: Logprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedded:
    """The vector of a generation that pools, before its end."""

    vector: Sequence[float]  # as long as the hidden size


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleFinished:
    """The end of one sample, after its last chunk."""

    index: int
    reason: FinishReason
    num_output_tokens: int
    matched_stop: str | None = None
    matched_token_id: int | None = None  # a stop_token_id; not set at end of text


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """All samples ended; the last event."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    time_to_first_token_s: float  # 0: not known
    duration_s: float


Event = Started | Waiting | PromptLogprobs | Chunk | Embedded | SampleFinished | Done
