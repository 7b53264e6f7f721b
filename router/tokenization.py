"""Text to tokens and back, with the checkpoint's own tokenizer.json.

Gives what `transformers` gives: text prompts with the special tokens that the tokenizer adds,
chats rendered by their template without. Long texts are done in threads, a bounded number of bytes
at a time. Knows nothing of requests or protobuf.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from tokenizers import Tokenizer

from router.chat_template import ChatTemplate, load_chat_template
from router.text import Detokenizer
from tandem.errors import CheckpointError, InvalidRequest, Overloaded
from tandem.types import TokenId

_INLINE_BYTES = 2048
"""Longer text is tokenized in a thread."""
_SHORT_BYTES = 65536
"""Up to here a text has a thread that long ones cannot take."""
_NUM_LONG_THREADS = 2
_BYTES_PER_TOKEN = 4
"""About as much work to decode a token."""
MAX_BYTES_UNDER_WAY = 16 * 1024 * 1024
"""Of texts in threads or waiting for one: some seconds of work."""

_T = TypeVar("_T")


class Tokenization:
    """One model's tokenizer and chat template. Immutable but for its threads."""

    def __init__(self, tokenizer: Tokenizer, chat_template: ChatTemplate | None) -> None:
        # A file may ask for truncation or padding; a server must do neither.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._special_ids = frozenset(
            TokenId(token_id) for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special
        )
        self._longest_token_bytes = max((len(token.encode()) for token in tokenizer.get_vocab()), default=1)
        self._short_thread = ThreadPoolExecutor(1, thread_name_prefix="tokenize-short")
        self._long_threads = ThreadPoolExecutor(_NUM_LONG_THREADS, thread_name_prefix="tokenize-long")
        self._bytes_under_way = 0

    @classmethod
    def load(cls, path: Path) -> Tokenization:
        """Reads a checkpoint folder. Raises CheckpointError that names the file."""
        file = path / "tokenizer.json"
        if not file.exists():
            raise CheckpointError(f"{file}: no such file")
        try:
            tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exceptions
            raise CheckpointError(f"{file}: not a tokenizer: {error}") from error
        return cls(tokenizer, load_chat_template(path))

    @property
    def has_chat_template(self) -> bool:
        """Whether chats can be rendered."""
        return self._chat_template is not None

    async def encode_text(self, text: str, max_tokens: int | None = None) -> tuple[TokenId, ...]:
        """Tokens of a text prompt, with the special tokens that the tokenizer adds.

        Raises InvalidRequest for a text too long for `max_tokens` of the longest token, before the work
        (it may give more of shorter ones), and Overloaded.
        """
        return await self._encode(text, max_tokens, add_special_tokens=True)

    async def encode_chat(
        self, messages: Sequence[Mapping[str, str]], max_tokens: int | None = None
    ) -> tuple[TokenId, ...]:
        """Tokens of a conversation up to where the assistant speaks. Raises as `encode_text`."""
        if self._chat_template is None:
            raise InvalidRequest("chat", "the model has no chat template")
        return await self._encode(self._chat_template.render(messages), max_tokens, add_special_tokens=False)

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of ids, each within the vocabulary. Raises Overloaded."""
        num_bytes = len(token_ids) * _BYTES_PER_TOKEN

        def decode() -> str:
            text: str
            (text,) = self._tokenizer.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)
            return text

        return await self._run(num_bytes, decode)

    async def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """The token each id stands for; "" for an id that the tokenizer does not have. Raises Overloaded."""
        return await self._run(
            len(token_ids) * _BYTES_PER_TOKEN, lambda: [self._tokenizer.id_to_token(each) or "" for each in token_ids]
        )

    def detokenizer(self, *, skip_special_tokens: bool) -> Detokenizer:
        """A new incremental decoder for one choice."""
        return Detokenizer(self._tokenizer, self._special_ids if skip_special_tokens else frozenset())

    def close(self) -> None:
        """Ends its threads."""
        for threads in (self._short_thread, self._long_threads):
            threads.shutdown(wait=False, cancel_futures=True)

    async def _encode(self, text: str, max_tokens: int | None, *, add_special_tokens: bool) -> tuple[TokenId, ...]:
        num_bytes = len(text.encode())
        if max_tokens is not None and num_bytes > max_tokens * self._longest_token_bytes:
            raise InvalidRequest("prompt", f"{num_bytes} bytes do not fit into {max_tokens} tokens")

        def encode() -> tuple[TokenId, ...]:
            (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            return tuple(map(TokenId, encoding.ids))

        return await self._run(num_bytes, encode)

    async def _run(self, num_bytes: int, work: Callable[[], _T]) -> _T:
        """Does `work` here if it is small, else in a thread. Raises Overloaded.

        The library's batch calls release the interpreter's lock; `encode` and `decode` keep it for
        seconds on a long text, in which no thread of the router does anything.
        """
        if num_bytes <= _INLINE_BYTES:
            return work()
        # A text that is alone is taken at any size: else the largest prompts could never come in.
        if self._bytes_under_way and self._bytes_under_way + num_bytes > MAX_BYTES_UNDER_WAY:
            raise Overloaded(f"{self._bytes_under_way} bytes of text wait to be tokenized already")
        threads = self._short_thread if num_bytes <= _SHORT_BYTES else self._long_threads
        self._bytes_under_way += num_bytes
        try:
            return await asyncio.get_running_loop().run_in_executor(threads, work)
        finally:
            self._bytes_under_way -= num_bytes
