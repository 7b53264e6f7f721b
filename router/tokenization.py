"""Text to tokens and back, with the checkpoint's own tokenizer.json.

Gives what `transformers` gives: text prompts with the special tokens that the tokenizer adds,
chats rendered by their template without. Knows nothing of requests or protobuf.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tokenizers import Tokenizer

from router.chat_template import ChatTemplate, load_chat_template
from router.detokenization import Detokenizer
from tandem.errors import CheckpointError, InvalidRequest
from tandem.types import TokenId

_INLINE_CHARACTERS = 2048
"""Longer text is tokenized in a thread (the library lets go of the interpreter's lock)."""
_INLINE_TOKENS = 4096
_NUM_THREADS = 2


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
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="tokenize")

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

    async def encode_text(self, text: str) -> tuple[TokenId, ...]:
        """Tokens of a text prompt, with the special tokens that the tokenizer adds."""
        return await self._encode(text, add_special_tokens=True)

    async def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> tuple[TokenId, ...]:
        """Tokens of a conversation up to where the assistant speaks. Raises InvalidRequest."""
        if self._chat_template is None:
            raise InvalidRequest("chat", "the model has no chat template")
        return await self._encode(self._chat_template.render(messages), add_special_tokens=False)

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of ids, each within the vocabulary."""
        if len(token_ids) <= _INLINE_TOKENS:
            return self._decode_now(token_ids, skip_special_tokens)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._decode_now, token_ids, skip_special_tokens)

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """The token each id stands for; "" for an id that the tokenizer does not have."""
        return [self._tokenizer.id_to_token(token_id) or "" for token_id in token_ids]

    def detokenizer(self, *, skip_special_tokens: bool) -> Detokenizer:
        """A new incremental decoder for one choice."""
        return Detokenizer(self._tokenizer, self._special_ids if skip_special_tokens else frozenset())

    def close(self) -> None:
        """Ends its threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _encode(self, text: str, *, add_special_tokens: bool) -> tuple[TokenId, ...]:
        if len(text) <= _INLINE_CHARACTERS:
            return self._encode_now(text, add_special_tokens)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._encode_now, text, add_special_tokens)

    def _encode_now(self, text: str, add_special_tokens: bool) -> tuple[TokenId, ...]:
        return tuple(map(TokenId, self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids))

    def _decode_now(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text
