"""The one way in, for the faces of all protocols: a neutral request and its caller in, choices out.

    judge and resolve ──▶ run, inside `async with entrance.run(…)` ──▶ leaving ends it and releases all it holds

A face calls `entrance.run(CompletionRequest, Caller)` as `async with` and reads `running.delivery` until an output
carries the summary. Refusals are raised before the body runs, later errors come from the delivery. Leaving the block
is the only cancellation: every attempt sends Release to both workers before the block is left. A face leaves the
block when the answer is written; until then the request is active, and `Unread` ends a request whose answer is
not read. Workers free their own blocks; the router frees its admission place and its handles. Workers do not stop
single choices: tokens of a choice that a stop string ended are dropped. Releasing, cancelling and abandoning are
idempotent.

Owns every request while it runs, and whether new ones are refused because the router drains. Checks, limits,
defaults, admission and times are the same for every face. Knows neither protobuf nor gRPC.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial

from models.files.checkpoint import CheckpointInfo
from router.chat_template import num_bytes, read_conversation
from router.choice_stream import ChoiceStream, PromptLogprobs, TokenRules
from router.delivery import Delivery, Unread
from router.generation import Generation, ResolvedRequest, Rooms
from router.grammar_check import GrammarCheck
from router.metrics import Timeline
from router.request import Caller, ChatPrompt, CompletionRequest, Prompt, TextPrompt, TokensPrompt
from router.room import check_pools, common_sequence, longest_sequence
from router.sampling import num_choices, num_seqs, resolve_sampling
from router.tokenization import Tokenization
from shell.clock import Deadline
from shell.telemetry.events import RequestRefused
from shell.telemetry.logging import get_logger
from tandem.errors import InvalidRequest, ModelNotFound, Reason, TandemError, Unavailable
from tandem.limits import Limits
from tandem.types import ChoiceSpec, GroupSpec, RequestId, TokenId
from tandem.validation import Validator

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RunningRequest:
    """A request under way, with the delivery of its choices."""

    request_id: RequestId
    prompt_token_ids: Sequence[TokenId]
    delivery: Delivery
    task: asyncio.Task[None]
    timeline: Timeline
    """Times of the request so far."""

    def cancel(self, error: TandemError) -> None:
        """Ends it at once, though its caller does not read; `delivery` then ends with `error`. Idempotent."""
        self.delivery.fail(error)
        self.task.cancel()

    def drop(self, error: TandemError) -> None:
        """As `cancel`, and what its caller has not read yet is lost."""
        _log.warning("answer not read: request ended", request_id=self.request_id, error=error.message)
        self.delivery.abandon(error)
        self.task.cancel()


class Entrance:
    """Entrance of the served model, shared by all faces."""

    def __init__(
        self,
        checkpoint: CheckpointInfo,
        tokenization: Tokenization,
        limits: Limits,
        rooms: Rooms,
        unread: Unread,
        max_priority: int = 0,
        grammars: GrammarCheck | None = None,
    ) -> None:
        """`max_priority`: of requests whose caller's token says nothing of it. `grammars`: None = workers judge."""
        self._checkpoint = checkpoint
        self._tokenization = tokenization
        self._limits = limits
        self._max_priority = max_priority
        self._rooms = rooms
        self._unread = unread
        self._grammars = grammars
        self._validator = Validator(limits, checkpoint.vocab_size, checkpoint.context_tokens)
        self._draining = asyncio.Event()
        self._num_reading = 0

    @property
    def draining(self) -> bool:
        """Whether new requests are refused."""
        return self._draining.is_set()

    def begin_drain(self) -> None:
        """Refuses new requests from now on; requests under way go on."""
        self._draining.set()

    async def wait_for_drain(self) -> None:
        """Returns once new requests are refused."""
        await self._draining.wait()

    @contextmanager
    def judging(self) -> Iterator[None]:
        """Emits what a face refuses before `run`, as every refusal is."""
        try:
            yield
        except TandemError as error:
            self._rooms.events.emit(RequestRefused(error))
            raise

    @asynccontextmanager
    async def run(self, request: CompletionRequest, caller: Caller) -> AsyncIterator[RunningRequest]:
        """Runs the request while inside; leaving, for whatever reason, releases all that it holds.

        Raises InvalidRequest, UnsupportedOption, ModelNotFound, Overloaded, Unavailable before anything
        runs; errors after that come by `delivery`.
        """
        timeline = Timeline(self._rooms.metrics)
        with self.judging(), self.reading(self._priority(request, caller)):
            resolved = await self._resolve(request, caller)
        group, text = resolved.group, resolved.text
        check = TokenRules(group.sampling, self._checkpoint.vocab_size).check
        detokenizer = partial(
            self._tokenization.detokenizer, group.prompt_token_ids, skip_special_tokens=text.skip_special_tokens
        )
        choices = [ChoiceStream(each.index, detokenizer(), text, check) for each in group.choices]
        generation = Generation(resolved, choices, self._rooms, timeline, self._prompt_logprobs(group))
        task = asyncio.create_task(generation.drive(), name=f"request {group.request_id}")
        running = RunningRequest(group.request_id, group.prompt_token_ids, generation.delivery, task, timeline)
        try:
            with self._unread.watching(running.delivery, running.drop):
                yield running
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            generation.abandon()  # a task that was cancelled before its first step has told nobody

    def _priority(self, request: CompletionRequest, caller: Caller) -> int:
        """Checked before anything is done in its name. Raises InvalidRequest."""
        bound = self._max_priority if caller.max_priority is None else caller.max_priority
        self._validator.validate_priority(request.priority, bound)
        return request.priority

    @contextmanager
    def reading(self, priority: int) -> Iterator[None]:
        """For the work of tokenizing, which is not begun for more requests than could then run or wait.

        Raises Unavailable when draining, Overloaded when full.
        """
        if self.draining:
            raise Unavailable("the router is draining", Reason.DRAINING)
        self._rooms.admission.queue.check_room(priority, self._num_reading)
        self._num_reading += 1
        try:
            yield
        finally:
            self._num_reading -= 1

    def end_unread(self) -> None:
        """Ends requests whose answers are not read. To be called every now and then."""
        self._unread.sweep_if_due()

    def check_model(self, name: str) -> None:
        """Checks that `name` is empty or the served model's. Raises ModelNotFound."""
        if not self._checkpoint.answers_to(name):
            raise ModelNotFound(
                f"this router serves {self._checkpoint.name}, not the model asked for: ask for that, "
                "for none, or start the router with --served-model-name"
            )

    async def tokenize(self, prompt: TextPrompt | ChatPrompt) -> tuple[TokenId, ...]:
        """Returns the prompt's tokens, even too many for the model. An empty text gives the tokenizer's special tokens.

        Raises InvalidRequest, Overloaded.
        """
        if isinstance(prompt, TextPrompt) and not prompt.text:
            return await self._tokenization.encode_text("", add_special_tokens=prompt.add_special_tokens)
        return await self._encode(prompt, None)

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of tokens. Raises InvalidRequest, Overloaded."""
        cap, vocab_size = self._limits.max_prompt_tokens, self._checkpoint.vocab_size
        if len(token_ids) > cap:
            raise InvalidRequest("token_ids", f"{len(token_ids)} ids exceed the limit of {cap}")
        if max(token_ids, default=0) >= vocab_size:
            raise InvalidRequest("token_ids", f"ids must lie in [0, {vocab_size})")
        return await self._tokenization.decode(token_ids, skip_special_tokens=skip_special_tokens)

    async def _resolve(self, request: CompletionRequest, caller: Caller) -> ResolvedRequest:
        """Every check, every default, the tokens."""
        total_s = self._rooms.policy.total_s
        seconds = total_s if caller.timeout_s is None else min(total_s, caller.timeout_s)
        deadline = Deadline.after(self._rooms.clock, seconds)
        self._validator.validate_request_id(request.request_id)
        self._validator.validate_cache_salt(request.cache_salt)
        self.check_model(request.model)
        token_ids = await self._prompt_tokens(request.prompt)
        n, num_wanted = num_choices(request.sampling, self._limits), num_seqs(request.sampling, self._limits)
        workers, num_prompt_tokens = self._rooms.workers.candidates(), len(token_ids)
        longest = longest_sequence(workers, num_prompt_tokens, num_wanted)
        usual = common_sequence(workers, num_prompt_tokens, num_wanted) or longest
        if longest is not None and longest <= num_prompt_tokens:  # no max_tokens helps: `check_pools` judges n
            longest = longest_sequence(workers, num_prompt_tokens)
        sampling, text = resolve_sampling(
            request.sampling,
            self._checkpoint,
            num_prompt_tokens,
            self._limits,
            max_sequence_tokens=longest,
            usual_sequence_tokens=usual,
        )
        if sampling.constraint is not None and self._grammars is not None:
            await self._grammars.check(sampling.constraint)
        group = GroupSpec(
            request_id=RequestId(request.request_id or secrets.token_hex(16)),
            prompt_token_ids=token_ids,
            sampling=sampling,
            choices=tuple(map(ChoiceSpec, range(n))),
            priority=request.priority,
            traceparent=caller.traceparent,
            tracestate=caller.tracestate,
            cache_salt=request.cache_salt,
        )
        check_pools(group, workers)
        return ResolvedRequest(group, text, deadline, caller.peer, isinstance(request.prompt, ChatPrompt))

    def _prompt_logprobs(self, group: GroupSpec) -> PromptLogprobs | None:
        num_top = group.sampling.prompt_logprobs
        vocab_size = self._checkpoint.vocab_size
        return None if num_top is None else PromptLogprobs(group.prompt_token_ids, num_top, vocab_size)

    async def _prompt_tokens(self, prompt: Prompt) -> tuple[TokenId, ...]:
        if isinstance(prompt, TokensPrompt):
            self._validator.validate_prompt_tokens(prompt.token_ids)
            return tuple(map(TokenId, prompt.token_ids))
        token_ids = await self._encode(prompt, self._checkpoint.context_tokens)
        self._validator.validate_prompt_tokens(token_ids, "text" if isinstance(prompt, TextPrompt) else "chat")
        return token_ids

    async def _encode(self, prompt: TextPrompt | ChatPrompt, max_tokens: int | None) -> tuple[TokenId, ...]:
        if isinstance(prompt, TextPrompt):
            self._validator.validate_prompt_bytes("text", len(prompt.text.encode()))
            special = prompt.add_special_tokens
            return await self._tokenization.encode_text(prompt.text, max_tokens, add_special_tokens=special)
        self._validator.validate_chat_messages(len(prompt.messages))
        self._validator.validate_prompt_bytes("chat", num_bytes(prompt))
        return await self._tokenization.encode_chat(read_conversation(prompt), max_tokens)
