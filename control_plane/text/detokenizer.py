"""Turn the ids of one sample into text as they come, and end it at a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from control_plane.generation import TextChoice
from control_plane.text.stop_matcher import StopMatcher
from control_plane.text.tokenizer import Tokenizer

# Prompt tokens that are decoded first, so that the output's first space is what it is in the middle of a text.
_CONTEXT_TOKENS = 6
# A character has at most four bytes, a token at least one: text that stays open for longer is not an incomplete
# character but invalid bytes, and waiting on would cost quadratic time.
_MAX_OPEN_TOKENS = 64
_INCOMPLETE = "\ufffd"
# From so many ids on a push is decoded as a whole, where that gives the same text: a taken-over row has thousands, and
# the library takes six times as long to step over them.
_BULK_TOKENS = 64
_BULK_TRIES = 3
_MAX_CHARACTER_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Piece:
    """What a push brought.

    Attributes:
        text: new text, always whole characters.
        matched_stop: the stop string that ended the text; nothing comes after it.
        num_tokens: pushed ids that count: all, or up to and including the one that completed the stop string.
    """

    text: str
    matched_stop: str | None
    num_tokens: int


class Detokenizer:
    """The text side of one sample. The same ids give the same text however they are cut into pushes."""

    def __init__(
        self, tokenizer: Tokenizer, text: TextChoice, *, prompt_token_ids: Sequence[int], min_tokens: int = 0
    ) -> None:
        """Begin after the prompt. A stop string completed by one of the first ``min_tokens`` ids is passed over."""
        self._stream = _TextStream(tokenizer, prompt_token_ids, text)
        self._choice = text
        self._matcher = StopMatcher(text.stop) if text.stop else None
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._held = ""  # text that may be the beginning of a stop string
        self._ended = False

    def push(self, token_ids: Sequence[int]) -> Piece:
        """Take the next ids of the output and return the text that is certain now."""
        if self._ended:
            return Piece("", None, 0)
        if self._choice.skip_text and self._matcher is None:
            return Piece("", None, len(token_ids))
        parts: list[str] = []
        count, tries_left = 0, _BULK_TRIES
        while count < len(token_ids):
            if tries_left and len(token_ids) - count >= _BULK_TOKENS and self._stream.is_settled:
                tries_left -= 1
                num_taken, certain = self._push_bulk(token_ids[count:])
                if num_taken:
                    parts.append(certain)
                    count += num_taken
                    continue
            self._num_tokens += 1
            new = self._stream.step(token_ids[count])
            count += 1
            if not new:
                continue
            if self._matcher is None:
                parts.append(new)
                continue
            certain, matched = self._search(self._matcher, new)
            parts.append(certain)
            if matched is not None:
                self._ended = True
                return Piece("".join(parts), matched, count)
        return Piece("".join(parts), None, len(token_ids))

    def flush(self) -> str:
        """End the text: return what was held back. An incomplete character at the very end leaves nothing."""
        if self._ended:
            return ""
        self._ended = True
        if self._choice.skip_text and self._matcher is None:
            return ""
        return self._held + self._stream.finish()

    def _push_bulk(self, token_ids: Sequence[int]) -> tuple[int, str]:
        """Take many ids at once where that gives the same: how many, up to the end of a character; and certain text."""
        if self._matcher is not None and self._num_tokens < self._min_tokens:
            return 0, ""
        num_taken, new = self._stream.peek(token_ids)
        text = self._held + new
        if not num_taken or any(stop in text for stop in self._choice.stop):
            return 0, ""  # one by one, to see which token completes it
        if self._matcher is not None:
            self._matcher.skip(new)
        keep = len(text) - (self._matcher.num_held if self._matcher is not None else 0)
        self._held = text[keep:]
        self._num_tokens += num_taken
        self._stream.skip(token_ids[:num_taken])
        return num_taken, text[:keep]

    def _search(self, matcher: StopMatcher, new: str) -> tuple[str, str | None]:
        match = matcher.push(new, may_match=self._num_tokens > self._min_tokens)
        text = self._held + new
        if match is not None:
            cut = match.end if self._choice.include_stop_str_in_output else match.begin
            return text[: len(self._held) + cut], match.stop
        keep = len(text) - matcher.num_held
        self._held = text[keep:]
        return text[:keep], None


class _TextStream:
    """Incremental decoding of ids without a stop rule."""

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], text: TextChoice) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = text.skip_special_tokens
        # Tokens whose text stands bare behind another of them.
        shows_bare = not (text.skip_special_tokens or text.spaces_between_special_tokens)
        self._bare = tokenizer.added_tokens if shows_bare else {}
        self._after_bare = False
        self._stream = tokenizer.decode_stream(skip_special_tokens=text.skip_special_tokens)
        self._settled: list[int] = []  # ids whose text was returned last: the context of the open ones
        self._open: list[int] = []  # ids whose text was not returned yet
        # Stepping instead of handing the ids over: a prompt that ends inside a character goes on in the output.
        self._not_ours = ""  # text of the prompt in front of its incomplete last character
        for token_id in self._context(prompt_token_ids):
            self.step(token_id)
        self._not_ours = self._remainder().rstrip(_INCOMPLETE)

    def step(self, token_id: int) -> str:
        self._open.append(token_id)
        try:
            new = self._tokenizer.step(self._stream, token_id)
        except Exception:
            # The library gives up where a later token changes earlier text (bytes that turn out not to be UTF-8, in
            # tokenizers with byte fallback). What was returned stays; the open ids are decoded on their own.
            new = self._decode(self._open)
            self._restart()
        else:
            if new is None and len(self._open) >= _MAX_OPEN_TOKENS:
                new = self._remainder()
                self._restart()
        after_bare, self._after_bare = self._after_bare, token_id in self._bare
        if new is None:
            return ""
        alone = len(self._open) == 1
        self._settled, self._open = self._open, []
        if after_bare and self._after_bare and alone:
            new = self._bare[token_id]
        return self._ours(new)

    @property
    def is_settled(self) -> bool:
        """Whether the text so far ends with a whole character, and the tokenizer lets ``peek`` work from there."""
        works = self._tokenizer.is_concatenative and not self._bare
        return works and not (self._open or self._not_ours) and bool(self._settled)

    def peek(self, token_ids: Sequence[int]) -> tuple[int, str]:
        """Say what stepping over ids would give, without doing so: of how many, and their text.

        None, unless all of them but a few at the end are whole characters. The stream is settled.
        """
        num_taken = len(token_ids)
        while self._ends_open(token_ids[:num_taken]):
            num_taken -= 1
            if len(token_ids) - num_taken > _MAX_CHARACTER_TOKENS:
                return 0, ""
        before = self._decode(self._settled)
        text = self._decode([*self._settled, *token_ids[:num_taken]])
        # The beginning of a text may be written otherwise; what is before must be told apart from it.
        if not before or not text.startswith(before) or _INCOMPLETE in text[len(before) :]:
            return 0, ""
        return num_taken, text[len(before) :]

    def _ends_open(self, token_ids: Sequence[int]) -> bool:
        return self._decode(token_ids[-2 * _MAX_CHARACTER_TOKENS :]).endswith(_INCOMPLETE)

    def skip(self, token_ids: Sequence[int]) -> None:
        """Go on behind ids whose text ``peek`` told."""
        self._stream = self._tokenizer.decode_stream(skip_special_tokens=self._skip_special_tokens)
        self._settled, self._open = [], []
        for token_id in self._context(token_ids):
            self.step(token_id)

    def finish(self) -> str:
        return self._ours(self._remainder().rstrip(_INCOMPLETE))

    def _ours(self, text: str) -> str:
        ours, self._not_ours = text.removeprefix(self._not_ours), ""
        return ours

    def _remainder(self) -> str:
        """Return the text of the open ids behind the settled ones."""
        if not self._open:
            return ""
        return self._decode(self._settled + self._open).removeprefix(self._decode(self._settled))

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)

    def _context(self, token_ids: Sequence[int]) -> Sequence[int]:
        """Return the last ids, from the beginning of a character on if one is near.

        With byte fallback a run of bytes that begins inside a character is invalid as a whole.
        """
        for length in range(_CONTEXT_TOKENS, _CONTEXT_TOKENS + _MAX_CHARACTER_TOKENS):
            context = token_ids[-length:]
            ends = range(len(context), max(len(context) - _MAX_CHARACTER_TOKENS, 0), -1)  # the last may be incomplete
            if not all(self._decode(context[:end]).startswith(_INCOMPLETE) for end in ends):
                return context
        return token_ids[-_CONTEXT_TOKENS:]

    def _restart(self) -> None:
        self._stream = self._tokenizer.decode_stream(skip_special_tokens=self._skip_special_tokens)
        for token_id in self._open[-_CONTEXT_TOKENS:]:
            self._tokenizer.step(self._stream, token_id)
