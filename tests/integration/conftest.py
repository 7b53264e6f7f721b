"""Workers that follow the protocol but compute nothing, and a checkpoint without weights.

A fake worker's tokens are a function of prompt and position, so that any worker continues any
sequence exactly. Each stage can be held, and each failure provoked, by hand.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tandem.errors import TandemError
from tandem.rpc.server import RpcServer, Service
from tandem.types import (
    FinishReason,
    Handle,
    PoolCounts,
    SequenceSpec,
    TokenDelta,
    TokenId,
    TokenLogprobs,
    WorkerInfo,
    WorkerLoad,
)
from tandem.v1.worker_pb2_grpc import add_WorkerServiceServicer_to_server
from worker.announcer import Announcer
from worker.router_session import RouterSession
from worker.service import WorkerServicer

EOS = TokenId(256)
VOCAB_SIZE = 260
CONTEXT_TOKENS = 512


def _token_at(prompt: Iterable[int], offset: int) -> TokenId:
    """The fake model: a letter that depends on the prompt and on where it stands."""
    return TokenId(ord("a") + (sum(prompt) + 7 * offset) % 26)


@dataclass(slots=True)
class _Running:
    spec: SequenceSpec
    next_offset: int
    attached: bool = False


Key = tuple[RouterSession, Handle]


class FakeWorker:
    """A WorkerCore of either role. Stages that are held do not happen until let go.

    Stages: "reserve", "prefill", "first" (PrefillDone), "attach", "handoff_word", "decode".
    """

    def __init__(self, info: WorkerInfo, peers: dict[str, FakeWorker]) -> None:
        """`peers`: all workers by name; decode workers are reached through it."""
        self.info = info
        self._held: set[str] = set()
        self._pause_at: int | None = None
        self._changed = asyncio.Event()
        self.sequences: dict[Key, _Running] = {}
        self.specs: list[SequenceSpec] = []
        self.num_releases = 0
        self.num_drain_orders = 0
        self.load = WorkerLoad(0, 0, 0, 0, PoolCounts(64, 64, 0, 0, 0, 0, 16, 0), 0, draining=False)
        self._peers = peers
        self._server: RpcServer | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._announcing: asyncio.Task[None] | None = None
        self.announcer: Announcer | None = None

    @property
    def idle(self) -> bool:
        """Whether nothing is held for any router."""
        return not self.sequences

    def hold(self, *stages: str) -> None:
        """These stages wait from now on."""
        self._held.update(stages)

    def pause_at(self, offset: int) -> None:
        """Decodes up to this many tokens of each completion."""
        self._pause_at = offset

    def let_go(self) -> None:
        """Nothing waits any more."""
        self._held.clear()
        self._pause_at = None
        self._notify()

    @property
    def offsets(self) -> list[int]:
        """How far each sequence has come."""
        return [each.next_offset for each in self.sequences.values()]

    def say(self, offset: int, *tokens: int, finish: FinishReason | None = None) -> None:
        """Sends tokens of its one sequence that the fake model would not."""
        ((session, handle),) = self.sequences
        session.deltas([(handle, TokenDelta(offset, tuple(map(TokenId, tokens)), (), finish))])

    # --- WorkerCore ---

    def reserve(self, session: RouterSession, handle: Handle, spec: SequenceSpec, local_prefill: bool) -> None:
        self._begin(session, handle, spec)
        self._spawn(self._reserve((session, handle), local_prefill))

    def prefill(
        self, session: RouterSession, handle: Handle, spec: SequenceSpec, ticket: bytes, kv_endpoint: bytes
    ) -> None:
        self._begin(session, handle, spec)
        self._spawn(self._prefill((session, handle), ticket, kv_endpoint))

    def release(self, session: RouterSession, handle: Handle) -> None:
        self.num_releases += 1
        self.sequences.pop((session, handle), None)
        self._notify()

    def router_lost(self, session: RouterSession) -> None:
        for key in [key for key in self.sequences if key[0] is session]:
            del self.sequences[key]
        self._notify()

    # --- what it does with them ---

    async def _reserve(self, key: Key, local_prefill: bool) -> None:
        session, handle = key
        if not await self._passes("reserve", key):
            return
        if not local_prefill:
            session.reserved(handle, str(handle).encode(), self.info.worker_id.encode())
            return
        session.reserved(handle)
        if await self._passes("first", key):
            session.prefill_done(handle, self._next(key), 0.25, 0.5)
            self.attach(key)

    async def _prefill(self, key: Key, ticket: bytes, kv_endpoint: bytes) -> None:
        session, handle = key
        decode = self._peers[kv_endpoint.decode()]
        if not await self._passes("prefill", key):
            return
        first = self._next(key)
        if await self._passes("attach", key) and first.finish_reason is None:
            decode.attach_ticket(ticket)
        if await self._passes("first", key):
            session.prefill_done(handle, first, 0.25, 0.5)
        if first.finish_reason is None and await self._passes("handoff_word", key):
            session.handoff_done(handle, 4096, 0.125)

    def attach_ticket(self, ticket: bytes) -> None:
        """The prompt's KV is here, with its first token."""
        for key in [key for key in self.sequences if str(key[1]).encode() == ticket]:
            self.sequences[key].next_offset += 1
            self.attach(key)

    def attach(self, key: Key) -> None:
        """Decodes from now on."""
        self._spawn(self._decode(key))

    async def _decode(self, key: Key) -> None:
        while await self._passes("decode", key):
            if self._pause_at is not None and self.sequences[key].next_offset >= self._pause_at:
                await self._changed.wait()
                continue
            delta = self._next(key)
            key[0].deltas([(key[1], delta)])
            if delta.finish_reason is not None:
                return
            await asyncio.sleep(0)

    def _next(self, key: Key) -> TokenDelta:
        running = self.sequences[key]
        spec, offset = running.spec, running.next_offset
        token = _token_at(spec.token_ids[: spec.num_prompt_tokens], offset)
        running.next_offset += 1
        finish = FinishReason.STOP if token in spec.sampling.end_token_ids else None
        if finish is None and offset + 1 == spec.sampling.max_tokens:
            finish = FinishReason.LENGTH
        logprobs = () if spec.sampling.logprobs is None else (TokenLogprobs(token, -0.5, ((token, -0.5),)),)
        return TokenDelta(offset, (token,), logprobs, finish)

    def fail_all(self, error: TandemError) -> None:
        """Gives up everything it runs."""
        for session, handle in list(self.sequences):
            session.failed(handle, error)
            self.sequences.pop((session, handle), None)
        self._notify()

    def _begin(self, session: RouterSession, handle: Handle, spec: SequenceSpec) -> None:
        self.specs.append(spec)
        self.sequences[session, handle] = _Running(spec, spec.num_output_tokens)

    async def _passes(self, stage: str, key: Key) -> bool:
        """Waits while the stage is held; False if the sequence is gone by then."""
        while stage in self._held and key in self.sequences:
            await self._changed.wait()
        return key in self.sequences

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- its life ---

    async def start(self, router_address: str) -> None:
        """Serves and announces itself."""
        port = await self._serve("127.0.0.1:0")
        self.info = replace(self.info, address=f"127.0.0.1:{port}")
        self.announce(router_address)

    async def serve_again(self) -> None:
        """On the same address, in the same life."""
        await self._serve(self.info.address)

    async def _serve(self, listen: str) -> int:
        servicer = WorkerServicer(self, self.info.incarnation)
        service = Service(
            "tandem.v1.WorkerService",
            lambda server: add_WorkerServiceServicer_to_server(servicer, server),
            long_lived=True,
        )
        self._server = RpcServer(listen, [service], announce_s=0)
        return await self._server.start()

    def announce(self, router_address: str) -> None:
        """Keeps a registration."""
        self.announcer = Announcer((router_address,), self.info, lambda: self.load, self._drain_ordered)
        self._announcing = asyncio.create_task(self.announcer.run())

    async def fall_silent(self) -> None:
        """Ends its registration; its service stands."""
        if self._announcing is not None:
            self._announcing.cancel()
            await asyncio.gather(self._announcing, return_exceptions=True)

    async def stop_serving(self) -> None:
        """Cuts every stream, as a dead process does; its registration stands."""
        if self._server is not None:
            await self._server.drain(0)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.sequences.clear()

    async def die(self) -> None:
        """Ends at once."""
        await self.stop_serving()
        await self.fall_silent()

    def _drain_ordered(self) -> None:
        self.num_drain_orders += 1


@pytest.fixture
def fake_worker() -> type[FakeWorker]:
    """Makes a worker: `fake_worker(info, peers)`."""
    return FakeWorker


@pytest.fixture
def token_at() -> Callable[[Iterable[int], int], TokenId]:
    """The fake model."""
    return _token_at


@pytest.fixture(scope="session")
def byte_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder without weights: a byte-level tokenizer, and one special token that ends a text."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    path.mkdir()
    # Byte b is token b, so that tests can read tokens as text.
    alphabet = _byte_alphabet()
    vocab = {char: byte for byte, char in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    assert tokenizer.token_to_id("<eos>") == EOS
    tokenizer.save(str(path / "tokenizer.json"))
    config = {"model_type": "llama", "vocab_size": VOCAB_SIZE, "max_position_embeddings": CONTEXT_TOKENS}
    (path / "config.json").write_text(json.dumps(config | {"eos_token_id": EOS}))
    (path / "generation_config.json").write_text(json.dumps({"do_sample": False}))
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, "eos_token": "<eos>"}))
    return path


def _byte_alphabet() -> list[str]:
    """The character that byte-level tokenizers write for each byte (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
