"""A real router on loopback, and workers that follow the protocol but compute nothing.

A fake worker's tokens are a function of prompt and position, so that any pair continues any
sequence exactly. Each stage can be held, and each failure provoked, by hand.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import grpc.aio
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from router.app import Router
from router.generation import Patience
from tandem.checkpoint import read_checkpoint
from tandem.config import RouterConfig
from tandem.convert import info_to_proto
from tandem.errors import TandemError
from tandem.incarnation import new_incarnation
from tandem.limits import Limits
from tandem.rpc.announcer import Announcer
from tandem.rpc.channel import open_channel
from tandem.rpc.router_session import RouterSession
from tandem.rpc.server import RpcServer, Service
from tandem.rpc.status import error_from_rpc
from tandem.rpc.worker_service import WorkerServicer
from tandem.types import (
    FinishReason,
    Handle,
    PoolCounts,
    Role,
    SequenceSpec,
    TokenDelta,
    TokenId,
    TokenLogprobs,
    WorkerId,
    WorkerInfo,
    WorkerLoad,
)
from tandem.v1 import inference_pb2 as pb
from tandem.v1 import inference_pb2_grpc, registry_pb2, registry_pb2_grpc
from tandem.v1.worker_pb2_grpc import add_WorkerServiceServicer_to_server

EOS = TokenId(256)
VOCAB_SIZE = 260
CONTEXT_TOKENS = 512
PATIENCE_S = 5.0
POLL_S = 0.001


def token_at(prompt: Iterable[int], offset: int) -> TokenId:
    """The fake model: a letter that depends on the prompt and on where it stands."""
    return TokenId(ord("a") + (sum(prompt) + 7 * offset) % 26)


async def until(condition: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
    """Returns once the condition holds; yields to the loop until then."""
    async with asyncio.timeout(timeout_s):
        # A condition over plain state of both sides has no one event to wait on.
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)


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

    def __init__(self, cluster: FakeCluster, info: WorkerInfo) -> None:
        self.info = info
        self._held: set[str] = set()
        self._pause_at: int | None = None
        self._changed = asyncio.Event()
        self.sequences: dict[Key, _Running] = {}
        self.specs: list[SequenceSpec] = []
        self.num_releases = 0
        self.num_drain_orders = 0
        self.load = WorkerLoad(0, 0, 0, 0, PoolCounts(64, 64, 0, 0, 0, 0, 16, 0), 0, draining=False)
        self._cluster = cluster
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
        decode = self._cluster.workers[kv_endpoint.decode()]
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
        token = token_at(spec.token_ids[: spec.num_prompt_tokens], offset)
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


class FakeCluster:
    """One router and its fake workers."""

    def __init__(self, router: Router, model: str, stack: AsyncExitStack) -> None:
        self.router = router
        self.workers: dict[str, FakeWorker] = {}
        self.stop = asyncio.Event()
        self._model = model
        self._stack = stack

    async def start(self) -> None:
        """Serves until `stop` is set."""
        port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.serving = asyncio.create_task(self.router.serve(self._stopped, port.set_result))
        self.address = f"127.0.0.1:{await port}"
        self.channel: grpc.aio.Channel = open_channel(self.address)

    async def end(self) -> None:
        """Stops the router."""
        await self.channel.close()
        self.stop.set()
        await self.serving

    async def _stopped(self) -> None:
        await self.stop.wait()

    @property
    def inference(self) -> inference_pb2_grpc.InferenceServiceAsyncStub:
        """A client."""
        return inference_pb2_grpc.InferenceServiceStub(self.channel)  # type: ignore[return-value]

    async def add(self, role: Role, name: str, **info: Any) -> FakeWorker:
        """Starts a worker and returns once the router can use it."""
        worker = await self.add_unchecked(role, name, **info)
        await until(lambda: any(v.obstacle is None for v in self.router.registry.views() if v.info == worker.info))
        return worker

    async def add_unchecked(self, role: Role, name: str, **info: Any) -> FakeWorker:
        """Starts a worker, whether or not the router takes it."""
        worker = FakeWorker(self, self.worker_info(role, name, **info))
        self.workers[name] = worker
        self._stack.push_async_callback(worker.die)
        await worker.start(self.address)
        return worker

    async def add_pair(self, suffix: str = "0") -> tuple[FakeWorker, FakeWorker]:
        """One prefill and one decode worker."""
        return await self.add(Role.PREFILL, f"p{suffix}"), await self.add(Role.DECODE, f"d{suffix}")

    def worker_info(self, role: Role, name: str, **changes: Any) -> WorkerInfo:
        """What such a worker announces."""
        checkpoint = read_checkpoint(self._model)
        info = WorkerInfo(
            worker_id=WorkerId(name),
            incarnation=new_incarnation(),
            role=role,
            address="",
            model=checkpoint.name,
            config_fingerprint=checkpoint.config_fingerprint,
            model_fingerprint="weights",
            layout_fingerprint="layout",
            transports=("shm", "tcp"),
            local_prefill_tokens=0,
            max_sequence_tokens=256,
            pid=1,
            device="fake",
        )
        return replace(info, **changes)

    def generate(
        self, *prompt: int, timeout_s: float | None = PATIENCE_S, **sampling: Any
    ) -> grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]:
        """Starts a generation from token ids."""
        request = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=prompt), sampling=pb.SamplingParams(**({"max_tokens": 8} | sampling))
        )
        return self.inference.Generate(request, timeout=timeout_s)

    def register(
        self, info: WorkerInfo
    ) -> grpc.aio.StreamStreamCall[registry_pb2.RegisterRequest, registry_pb2.RegisterResponse]:
        """Begins a Register stream by hand."""
        first = registry_pb2.RegisterRequest(info=info_to_proto(info))

        async def requests() -> AsyncIterator[registry_pb2.RegisterRequest]:
            yield first
            await self.stop.wait()

        return registry_pb2_grpc.RegistryServiceStub(self.channel).Register(requests())

    @staticmethod
    def completion(prompt: Iterable[int], length: int) -> list[int]:
        """What the fake model says after `prompt`."""
        prompt = tuple(prompt)
        return [token_at(prompt, offset) for offset in range(length)]

    @staticmethod
    async def until(condition: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
        """Returns once the condition holds; fails after a while."""
        await until(condition, timeout_s)

    @staticmethod
    async def read_tokens(call: Any) -> list[int]:
        """All tokens of a generation; raises as the call does."""
        tokens: list[int] = []
        while isinstance(response := await call.read(), pb.GenerateResponse):
            tokens += response.token_ids
        return tokens

    @staticmethod
    async def error_of(call: Any) -> tuple[TandemError, grpc.StatusCode, list[int]]:
        """How a call failed: the error, its status, the tokens that came before."""
        tokens: list[int] = []
        try:
            while isinstance(response := await call.read(), pb.GenerateResponse):
                tokens += response.token_ids
        except grpc.aio.AioRpcError as error:
            return error_from_rpc(error), error.code(), tokens
        raise AssertionError(f"it succeeded with {tokens}")

    @property
    def idle(self) -> bool:
        """Whether no worker holds anything and no request is under way."""
        return all(worker.idle for worker in self.workers.values()) and self.router.queue.num_active == 0


Launch = Callable[..., Awaitable[FakeCluster]]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
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


@pytest.fixture
def patience() -> type[Patience]:
    """How long requests bear with what."""
    return Patience


@pytest.fixture
def limits() -> type[Limits]:
    """Caps on requests."""
    return Limits


@pytest.fixture
async def launch(checkpoint: Path) -> AsyncIterator[Launch]:
    """Starts routers; afterwards every worker must be idle, and all is stopped."""
    clusters: list[FakeCluster] = []
    async with AsyncExitStack() as stack:

        async def start(*, patience: Patience | None = None, stall_s: float = 30.0, **options: Any) -> FakeCluster:
            config = RouterConfig(**{"model": str(checkpoint), "listen": "127.0.0.1:0", "drain_grace_s": 0.0} | options)
            router = Router.build(config, patience=patience, stall_s=stall_s, rng=Random(1))
            cluster = FakeCluster(router, config.model, stack)
            await cluster.start()
            stack.push_async_callback(cluster.end)
            clusters.append(cluster)
            return cluster

        yield start
        for cluster in clusters:
            await until(lambda cluster=cluster: cluster.idle)


@pytest.fixture
async def cluster(launch: Launch) -> FakeCluster:
    """A router without workers, that waits for a pair only briefly."""
    return await launch(patience=Patience(placement_s=0.2))
