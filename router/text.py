"""One choice's text as its tokens come, and the stop strings in it; pure.

token id ─▶ Detokenizer ─▶ piece of text ─▶ StopStrings ─▶ text that can be shown
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from tandem.types import TokenId

MAX_PENDING_TOKENS = 32
"""No character takes more tokens than this; a longer tail is garbage and is given out as it is."""
_LONGEST_PARTIAL_CHARACTER_TOKENS = 3
"""UTF-8 has up to four bytes, so an incomplete character has at most three."""
_CONTEXT_TOKENS = 5
"""Tokens of the prompt's end: nearly always a token with text is among them."""
_UNDECODABLE = "\ufffd"
_PRINTABLE_BYTES = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
BYTES_BY_CHARACTER = {
    **{chr(byte): byte for byte in _PRINTABLE_BYTES},
    **{chr(256 + index): byte for index, byte in enumerate(sorted(set(range(256)) - set(_PRINTABLE_BYTES)))},
}
"""Bytes by the characters that vocabularies of byte-level tokenizers write them as, since GPT-2."""


class WholeTokens:
    """Texts of tokens that are whole characters, of one tokenizer whose tokens are bytes and nothing else.

    There the text of a completion is that of its bytes: such a token's does not depend on what stands around it, unless
    a character is still incomplete before it. Shared by all choices; filled as tokens come.
    """

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> WholeTokens | None:
        """None if a token's text depends on its place, as where a space is dropped at the beginning."""
        decoder = tokenizer.decoder
        is_byte_level = decoder is not None and json.loads(decoder.__getstate__()).get("type") == "ByteLevel"
        return cls(tokenizer) if is_byte_level else None

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[TokenId, str | None] = {}
        """None of a token that is not whole characters, or that there is not."""

    def text_of(self, token_id: TokenId) -> str | None:
        """Returns the text of a token that is whole text; else None."""
        try:
            return self._texts[token_id]
        except KeyError:
            text: str = self._tokenizer.decode([token_id], skip_special_tokens=False)
            found = self._texts[token_id] = text if text and _UNDECODABLE not in text else None
            return found


class Detokenizer:
    """One choice's decoder.

    The text is what the completion's tokens add to that of the prompt, whose last ones decide about a first space.
    Bytes of a character still incomplete are held back until it is whole, or until `finish`. Built on `DecodeStream`;
    what that does not do is added here: the held tail can be had at the end, ids that it rejects do not end the
    request, and its window stays bounded on endless undecodable or skipped tokens.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        skipped_token_ids: frozenset[TokenId],
        whole: WholeTokens | None = None,
        prompt_token_ids: Sequence[TokenId] = (),
    ) -> None:
        """`whole`: of a tokenizer that has such. The text goes on behind that of `prompt_token_ids`."""
        self._tokenizer = tokenizer
        self._skipped = skipped_token_ids
        self._whole = whole
        self._stream: DecodeStream | None = None
        """What knows the pending tokens; None = it is to begin with the next."""
        self._context: list[int] = []
        """Tokens of the last text given out: what precedes decides about spaces."""
        self._pending: list[int] = []
        """Tokens whose text is not out yet."""
        if whole is None:
            self._begin_behind(prompt_token_ids[-_CONTEXT_TOKENS:])

    def step(self, token_id: TokenId) -> str:
        """Adds one token; returns the text that it completes, often "" for part of a character."""
        if token_id in self._skipped:
            return ""
        if self._whole is not None and not self._pending and (whole := self._whole.text_of(token_id)) is not None:
            self._context, self._stream = [token_id], None
            return whole
        self._pending.append(token_id)
        text = self._stream_step(token_id)
        if text is not None:
            self._context, self._pending = self._pending, []
            return text
        if len(self._pending) > MAX_PENDING_TOKENS:
            return self._give_out()
        return ""

    def finish(self) -> str:
        """The text of what is held back, incomplete characters as U+FFFD."""
        text = self._text_after_context(self._pending)
        self._context, self._pending = self._pending, []
        return text

    def _begin_behind(self, token_ids: Sequence[TokenId]) -> None:
        """Begins behind the last token that begins or ends within a character."""
        shown = [each for each in token_ids if each not in self._skipped]
        whole = (shown[start:] for start in range(len(shown)) if _UNDECODABLE not in self._decode(shown[start:]))
        for token_id in next(whole, ()):
            self.step(token_id)

    def _stream_step(self, token_id: int) -> str | None:
        if self._stream is None:
            self._stream = DecodeStream(skip_special_tokens=False)
        try:
            text: str | None = self._stream.step(self._tokenizer, token_id)
        # The library raises a bare Exception where decoding more tokens changes earlier text.
        except Exception:  # noqa: BLE001
            self._stream = DecodeStream(skip_special_tokens=False)
            self._stream.step(self._tokenizer, token_id)
            return self._text_after_context(self._pending)
        return text

    def _give_out(self) -> str:
        """Gives out all pending tokens but a tail that may be the start of a character."""
        cut = self._clean_cut()
        text = self._text_after_context(self._pending[:cut])
        tail = self._pending[cut:]
        self._context, self._pending = self._pending[:cut], []
        self._stream = None
        return text + "".join([self.step(TokenId(token_id)) for token_id in tail])

    def _clean_cut(self) -> int:
        """Where to cut near the end of what is pending so that the two parts decode as the whole does, if anywhere."""
        token_ids, whole = self._pending, self._decode(self._pending)
        last = len(token_ids) - _LONGEST_PARTIAL_CHARACTER_TOKENS
        for cut in range(last, last - 8, -1):
            if self._decode(token_ids[:cut]) + self._decode(token_ids[cut:]) == whole:
                return cut
        return last

    def _text_after_context(self, token_ids: Sequence[int]) -> str:
        """Returns the text that `token_ids` add to the context's text."""
        before = self._decode(self._context)
        whole = self._decode([*self._context, *token_ids])
        return whole[len(before) :] if whole.startswith(before) else self._decode(token_ids)

    def _decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=False)
        return text


class StopStrings:
    """One choice's matcher. `feed` pieces until one matches, or `finish` at the end of the text.

    The match that *ends* first wins, and among those that end at the same character the longest:
    the only rule whose outcome does not depend on how the text was cut into pieces. Only the
    longest tail that may still become a stop string is held back.
    """

    def __init__(self, stop: tuple[str, ...], *, include_stop: bool = False) -> None:
        self._stop = stop
        self._include_stop = include_stop
        self._first_chars = frozenset(text[0] for text in stop)
        self._longest_tail = max(map(len, stop), default=1) - 1
        self._held = ""

    def feed(self, piece: str) -> tuple[str, str | None]:
        """Adds text; returns what can be shown now and the stop string that it completed: the last thing to feed."""
        text = self._held + piece
        match = self._first_match(text)
        if match is not None:
            self._held = ""
            start, stop = match
            return text[: start + len(stop)] if self._include_stop else text[:start], stop
        cut = self._held_from(text)
        self._held = text[cut:]
        return text[:cut], None

    def finish(self) -> str:
        """Returns the text held back; nothing follows."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, str] | None:
        """(start, stop string) of the match that ends first."""
        best: tuple[int, int, str] | None = None
        for stop in self._stop:
            start = text.find(stop)
            if start >= 0:
                candidate = (start + len(stop), start, stop)
                best = candidate if best is None else min(best, candidate)
        return None if best is None else (best[1], best[2])

    def _held_from(self, text: str) -> int:
        """Where the longest tail begins that is a proper start of a stop string."""
        for cut in range(max(0, len(text) - self._longest_tail), len(text)):
            if text[cut] in self._first_chars:
                tail = text[cut:]
                if any(stop.startswith(tail) for stop in self._stop):
                    return cut
        return len(text)
