"""From a GenerateRequest to a GenerationRequest: every check, every default, the tokens.

The only place of the router that reads client protobufs; `tandem.validation` judges them.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Protocol

from router.request import GenerationRequest
from router.tokenization import Tokenization
from tandem.checkpoint import CheckpointInfo
from tandem.clock import Deadline
from tandem.errors import InvalidRequest, ModelNotFound
from tandem.limits import Limits
from tandem.sampling import resolve_sampling
from tandem.types import RequestId, TokenId
from tandem.v1 import inference_pb2
from tandem.validation import Validator


class Capacity(Protocol):
    """Tokens that workers hold of one sequence."""

    def longest_sequence(self) -> int | None:
        """Of those that hold most; None if unknown."""
        ...

    def common_sequence(self, num_prompt_tokens: int) -> int | None:
        """Of those that take such a prompt now; None if none does."""
        ...


class Intake:
    """Judges and resolves what clients ask of one model."""

    def __init__(
        self,
        checkpoint: CheckpointInfo,
        tokenization: Tokenization,
        limits: Limits,
        capacity: Capacity,
    ) -> None:
        """`capacity`: of the workers."""
        self._checkpoint = checkpoint
        self._tokenization = tokenization
        self._limits = limits
        self._capacity = capacity
        self._validator = Validator(limits, checkpoint.vocab_size, checkpoint.context_tokens)

    def check_model(self, name: str) -> None:
        """Empty means the served one. Raises ModelNotFound for another."""
        if name and name != self._checkpoint.name:
            raise ModelNotFound(f"this router serves {self._checkpoint.name}, not the model asked for")

    async def read(
        self, message: inference_pb2.GenerateRequest, deadline: Deadline, traceparent: str, tracestate: str = ""
    ) -> GenerationRequest:
        """Raises InvalidRequest, UnsupportedOption, ModelNotFound, each naming the field."""
        self._validator.validate_request_id(message.request_id)
        self._validator.validate_cache_salt(message.cache_salt)
        self.check_model(message.model)
        prompt = await self._prompt(message)
        sampling, text = resolve_sampling(
            message.sampling,
            self._checkpoint,
            len(prompt),
            self._limits,
            max_sequence_tokens=self._capacity.longest_sequence(),
            usual_sequence_tokens=self._capacity.common_sequence(len(prompt)),
        )
        return GenerationRequest(
            request_id=RequestId(message.request_id or secrets.token_hex(16)),
            prompt=prompt,
            sampling=sampling,
            text=text,
            deadline=deadline,
            priority=message.priority,
            traceparent=traceparent,
            tracestate=tracestate,
        )

    async def tokenize(self, message: inference_pb2.TokenizeRequest) -> tuple[TokenId, ...]:
        """Tokens of the message's text or chat, were they too many for the model; no text gives none.

        Raises InvalidRequest, ModelNotFound, Overloaded.
        """
        self.check_model(message.model)
        match message.WhichOneof("input"):
            case "text" if not message.text:
                return await self._tokenization.encode_text("")
            case "text":
                return await self._encode_text(message.text, None)
            case "chat":
                return await self._encode_chat(message.chat, None)
            case _:
                raise InvalidRequest("input", "one of text and chat must be set")

    async def detokenize(self, message: inference_pb2.DetokenizeRequest) -> str:
        """Text of the message's tokens. Raises InvalidRequest, ModelNotFound, Overloaded."""
        self.check_model(message.model)
        cap, vocab_size = self._limits.max_prompt_tokens, self._checkpoint.vocab_size
        if len(message.token_ids) > cap:
            raise InvalidRequest("token_ids", f"{len(message.token_ids)} ids exceed the limit of {cap}")
        if max(message.token_ids, default=0) >= vocab_size:
            raise InvalidRequest("token_ids", f"ids must lie in [0, {vocab_size})")
        skip = message.skip_special_tokens if message.HasField("skip_special_tokens") else True
        return await self._tokenization.decode(message.token_ids, skip_special_tokens=skip)

    async def _prompt(self, message: inference_pb2.GenerateRequest) -> tuple[TokenId, ...]:
        field, most = message.WhichOneof("prompt"), self._checkpoint.context_tokens
        match field:
            case "text":
                token_ids = await self._encode_text(message.text, most)
            case "token_ids":
                self._validator.validate_prompt_tokens(message.token_ids.ids)
                return tuple(map(TokenId, message.token_ids.ids))
            case "chat":
                token_ids = await self._encode_chat(message.chat, most)
            case _:
                raise InvalidRequest("prompt", "one of text, token_ids and chat must be set")
        self._validator.validate_prompt_tokens(token_ids, field)
        return token_ids

    async def _encode_text(self, text: str, max_tokens: int | None) -> tuple[TokenId, ...]:
        self._validator.validate_prompt_bytes("text", len(text.encode()))
        return await self._tokenization.encode_text(text, max_tokens)

    async def _encode_chat(self, chat: inference_pb2.Chat, max_tokens: int | None) -> tuple[TokenId, ...]:
        self._validator.validate_chat_messages(len(chat.messages))
        num_bytes = sum(len(each.content.encode()) + len(each.role.encode()) for each in chat.messages)
        self._validator.validate_prompt_bytes("chat", num_bytes)
        messages: list[Mapping[str, str]] = [{"role": each.role, "content": each.content} for each in chat.messages]
        return await self._tokenization.encode_chat(messages, max_tokens)
