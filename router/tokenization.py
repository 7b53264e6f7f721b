"""Turns text into tokens and back, with the checkpoint's own tokenizer.

Gives what `transformers` gives: text prompts with the special tokens that the tokenizer adds,
chats rendered by their template without. Long texts are done in threads, small ones first, a bounded
number of bytes at a time. Knows nothing of requests or protobuf.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import TypeVar

from tokenizers import Tokenizer

from models.files.tokenizer_file import read_tokenizer
from router.chat_template import ChatTemplates, Conversation, load_chat_template
from router.lane import Lane
from router.text import BYTES_BY_CHARACTER, Detokenizer, WholeTokens
from tandem.errors import InvalidRequest, Overloaded
from tandem.types import TokenId

_INLINE_BYTES = 2048
"""Longer text is tokenized in a thread."""
_SHORT_BYTES = 65536
"""Longer texts have one thread of two, not both: they do not hold up short ones, and one that cannot be cut takes much
memory."""
_BYTES_PER_TOKEN = 4
"""Text that takes about as long to tokenize as one token takes to decode."""
MAX_BYTES_UNDER_WAY = 16 * 1024 * 1024
"""Most bytes of texts in threads or waiting for one: some seconds of work."""
_BYTES_PER_ANSWERED_TOKEN = 80
"""Memory of a token's id, and of its place in a message and in that message's bytes."""
MAX_ANSWER_BYTES = 64 * 1024 * 1024
"""Most bytes of answers whose tokens have not left yet: with as many, no long text is begun."""
_SLICE_TOKENS = 4096
"""Tokens described at a time: between two slices other threads of the router may run."""
_PIECE_CHARACTERS = 64 * 1024
_CUT = re.compile(r"[!-~](?= )")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPANNING = re.compile(r"[!-~][ Ġ▁]")
"""A token with a space inside, as tokenizers write a space."""
_PROBE = (
    "It's 12345 67 o'clock; DON'T  stop: 'l l' ,  , \t x\n\n  if (a != b) { \r\n return 'x' ;  }  THEY'LL 's 't 're "
    "naïve … façade — 東京 2,000.5 % !! a1 1a __ <|a|> </s> [INST] #  ## http://a.b/c?d=e f 🙂 g\n h  "
) + " ".join(map(chr, range(0x21, 0x7F)))
"""Every character before a cut, and every kind of character near one, alone and in runs."""

_T = TypeVar("_T")


class Tokenization:
    """A model's tokenizer and chat template. Immutable but for its threads."""

    def __init__(
        self, tokenizer: Tokenizer, chat_template: ChatTemplates | None, ends: frozenset[TokenId] = frozenset()
    ) -> None:
        """`ends`: tokens that end a text; their own text is left out like that of special tokens."""
        # A file may ask for truncation or padding; a server must do neither.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        added = tokenizer.get_added_tokens_decoder()
        self._special_ids = ends.union(TokenId(token_id) for token_id, token in added.items() if token.special)
        self._longest_token_bytes = max((len(token.encode()) for token in tokenizer.get_vocab()), default=1)
        self._whole = WholeTokens.of(tokenizer)
        self._around = _added_around(tokenizer) if can_be_cut(tokenizer) else None
        """Special tokens before and after a text; None = long texts are not cut."""
        self._lane = Lane("tokenize", 2, large=_SHORT_BYTES)
        self._answer_bytes = 0

    @classmethod
    def load(
        cls, path: Path, chat_template: Path | None = None, ends: frozenset[TokenId] = frozenset()
    ) -> Tokenization:
        """Reads a checkpoint folder or GGUF file; the file `chat_template`, if given, takes the place of its template.

        Raises CheckpointError that names the file.
        """
        return cls(read_tokenizer(path), load_chat_template(path, chat_template), ends)

    @property
    def has_chat_template(self) -> bool:
        """Whether chats can be rendered."""
        return self._chat_template is not None

    @property
    def chat_template_source(self) -> str | None:
        """The text of the template that chats with tools are rendered by; None = there is none."""
        return None if self._chat_template is None else self._chat_template.source

    @property
    def special_tokens(self) -> frozenset[str]:
        """Texts of the tokens that are left out of answers."""
        return frozenset(filter(None, map(self._tokenizer.id_to_token, self._special_ids)))

    async def encode_text(
        self, text: str, max_tokens: int | None = None, *, add_special_tokens: bool = True
    ) -> tuple[TokenId, ...]:
        """Returns the tokens of a text prompt, with the special tokens that the tokenizer adds, unless told otherwise.

        Raises InvalidRequest for a text too long for `max_tokens` of the longest token, before the work
        (it may give more of shorter ones), and Overloaded.
        """
        return await self._encode(text, max_tokens, add_special_tokens=add_special_tokens)

    async def encode_chat(self, conversation: Conversation, max_tokens: int | None = None) -> tuple[TokenId, ...]:
        """Returns the tokens of a conversation up to where the assistant speaks. Raises as `encode_text`."""
        if self._chat_template is None:
            raise InvalidRequest(
                "chat", "the model has no chat template: send text, or start the router with --chat-template"
            )
        return await self._encode(self._chat_template.render(conversation), max_tokens, add_special_tokens=False)

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Returns the text of ids, each within the vocabulary. Raises Overloaded."""
        num_bytes = len(token_ids) * _BYTES_PER_TOKEN

        def decode() -> str:
            text: str
            (text,) = self._tokenizer.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)
            return text

        return await self._run(num_bytes, decode)

    def token_bytes(self, token_id: TokenId) -> bytes:
        """Returns the text of one token as UTF-8, of which a token may hold a part; empty for an unknown id."""
        token = self._tokenizer.id_to_token(token_id) or ""
        if self._whole is not None and token and all(each in BYTES_BY_CHARACTER for each in token):
            return bytes(BYTES_BY_CHARACTER[each] for each in token)
        if match := _BYTE_TOKEN.fullmatch(token):
            return bytes.fromhex(match[1])
        return token.replace("▁", " ").encode()

    async def describe(
        self, token_ids: Sequence[TokenId], take: Callable[[Sequence[TokenId], Sequence[str]], None]
    ) -> None:
        """Calls `take`, in a thread if they are many, with some ids and the token each stands for, until all are taken.

        The token is "" for an id that the tokenizer does not have. Raises Overloaded.
        """

        def describe() -> None:
            for start in range(0, len(token_ids), _SLICE_TOKENS):
                ids = token_ids[start : start + _SLICE_TOKENS]
                take(ids, [self._tokenizer.id_to_token(each) or "" for each in ids])

        await self._run(len(token_ids) * _BYTES_PER_TOKEN, describe)

    @contextmanager
    def answering(self, num_tokens: int) -> Iterator[None]:
        """An answer of `num_tokens` counts towards MAX_ANSWER_BYTES while inside, until it has left."""
        num_bytes = num_tokens * _BYTES_PER_ANSWERED_TOKEN
        self._answer_bytes += num_bytes
        try:
            yield
        finally:
            self._answer_bytes -= num_bytes

    def detokenizer(self, prompt_token_ids: Sequence[TokenId], *, skip_special_tokens: bool) -> Detokenizer:
        """Returns a new incremental decoder for a choice."""
        skipped = self._special_ids if skip_special_tokens else frozenset()
        return Detokenizer(self._tokenizer, skipped, self._whole, prompt_token_ids)

    def close(self) -> None:
        """Ends its threads."""
        self._lane.close()

    async def _encode(self, text: str, max_tokens: int | None, *, add_special_tokens: bool) -> tuple[TokenId, ...]:
        num_bytes = len(text.encode())
        if max_tokens is not None and num_bytes > max_tokens * self._longest_token_bytes:
            raise InvalidRequest("prompt", f"{num_bytes} bytes do not fit into {max_tokens} tokens")

        def encode() -> tuple[TokenId, ...]:
            if num_bytes <= _SHORT_BYTES:
                return tuple(map(TokenId, self._ids(text, add_special_tokens=add_special_tokens)))
            if self._answer_bytes >= MAX_ANSWER_BYTES:
                raise Overloaded(f"{self._answer_bytes} bytes of answers with tokens have not left yet")
            return tuple(map(TokenId, self._ids_of_long(text, add_special_tokens=add_special_tokens)))

        return await self._run(num_bytes, encode)

    def _ids_of_long(self, text: str, *, add_special_tokens: bool) -> Iterable[int]:
        if self._around is None:
            return self._ids(text, add_special_tokens=add_special_tokens)
        ids = chain.from_iterable(self._ids(piece, add_special_tokens=False) for piece in pieces(text))
        before, after = self._around if add_special_tokens else ((), ())
        return chain(before, ids, after)

    def _ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    async def _run(self, num_bytes: int, work: Callable[[], _T]) -> _T:
        """Does `work` here if it is small, else in a thread. Raises Overloaded.

        The library's batch calls release the interpreter's lock; `encode` and `decode` keep it for
        seconds on a long text, in which no thread of the router does anything.
        """
        if num_bytes <= _INLINE_BYTES:
            return work()
        under_way = self._lane.size
        # A text that is alone is taken at any size: else the largest prompts could never come in.
        if under_way and under_way + num_bytes > MAX_BYTES_UNDER_WAY:
            raise Overloaded(f"{under_way} bytes of text wait to be tokenized already")
        return await self._lane.run(num_bytes, work)


def _added_around(tokenizer: Tokenizer) -> tuple[Sequence[int], Sequence[int]] | None:
    """Returns the special tokens that the tokenizer adds before and after a text; None if it does not show."""
    encoding = tokenizer.encode("a", add_special_tokens=True)
    added = encoding.special_tokens_mask
    if 0 not in added:
        return None
    return encoding.ids[: added.index(0)], encoding.ids[len(added) - added[::-1].index(0) :]


def can_be_cut(tokenizer: Tokenizer) -> bool:
    """Whether `pieces` of a text give the same tokens as the whole.

    If no token spans a cut, what a model makes of the text on one side of it (merges, the best path) does not depend on
    the other side. Whether the steps before the model look across is tried on a text.
    """
    if any(token.rstrip for token in tokenizer.get_added_tokens_decoder().values()):  # takes in the space after it
        return False
    if any(_SPANNING.search(token) for token in tokenizer.get_vocab()):
        return False
    whole = _plain_ids(tokenizer, _PROBE)
    cuts = [cut.end() for cut in _CUT.finditer(_PROBE)]
    return all(_plain_ids(tokenizer, _PROBE[:cut]) + _plain_ids(tokenizer, _PROBE[cut:]) == whole for cut in cuts)


def pieces(text: str) -> Iterator[str]:
    """Yields the text in pieces of about 64 Ki characters, longer where there is no place to cut.

    Until it has a text's last token, a tokenizer holds many times the text's size in memory; in pieces, as much for one
    piece. Texts are cut before a space that follows a printable ASCII character.
    """
    start = 0
    while start < len(text):
        cut = _CUT.search(text, start + _PIECE_CHARACTERS)
        end = len(text) if cut is None else cut.end()
        yield text[start:end]
        start = end


def _plain_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids
