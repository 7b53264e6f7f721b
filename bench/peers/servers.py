"""Servers against each other on the same cores: Tandem through gRPC, vLLM through its own HTTP server.

All servers are up at once and take turns. vLLM's processes are stopped (SIGSTOP) while they have no turn, since its
idle worker keeps polling. Client and servers share the cores; the client's share of the time is recorded.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path

from bench.peers.vllm_server import MODEL, VllmServer
from bench.support.checkpoints import CONTEXT_TOKENS
from bench.support.cluster import serve
from bench.support.http_streams import HttpStreams
from bench.support.streams import StreamClient, TandemStreams, fresh_prompts, tokens_per_s
from tandem.client import AsyncClient

COLOCATED = "tandem colocated"
DISAGGREGATED = "tandem disaggregated"
TANDEM_SERVERS: Mapping[str, tuple[str, ...]] = {
    DISAGGREGATED: ("--prefill", "1", "--decode", "1"),
    COLOCATED: ("--prefill", "0", "--decode", "1", "--local-prefill-tokens", "unlimited"),
}
"""Options of `tandem serve` with static roles, by the name in the tables."""
AUTO = "tandem auto"
AUTO_OPTIONS = ("--workers", "2")
VLLM_SERVER = "vllm"
WARM_UP_PROMPTS = (*[32] * 16, 1024)
"""Tokens of those that warm a server up, all at once."""
WARM_UP_OUTPUT = 8
"""Tokens of each answer then."""
KV_MEMORY = "2GiB"
"""Of each of Tandem's workers: all servers are up at once, and by default each counts on all memory that is free."""
_READY_TIMEOUT_S = 60.0
_SETTLE_S = 0.3


@dataclass(frozen=True, slots=True)
class Server:
    """How a server of Tandem is started."""

    options: Sequence[str]
    """Of `tandem serve`."""
    checkout: Path | None = None
    """An installed checkout whose server it is; None: this one's."""


Turn = Callable[[], AbstractAsyncContextManager[StreamClient]]
"""One server's turn: it runs within the block."""
Measure = Callable[[str, StreamClient, int], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class ServedShape:
    """The work of one turn."""

    streams: int = 16
    prompt_tokens: int = 256
    output_tokens: int = 64
    alone_repeats: int = 3


@dataclass(slots=True)
class Served:
    """One server over all rounds."""

    tokens_per_s: list[float] = field(default_factory=list)
    """Output tokens of all streams together, one entry per round."""
    gap_s: list[float] = field(default_factory=list)
    """Between messages, all streams together."""
    alone_ttft_s: list[float] = field(default_factory=list)
    alone_gap_s: list[float] = field(default_factory=list)
    client_cpu_share: list[float] = field(default_factory=list)
    """Of one core, while all streams ran: this process's time."""


async def measure_turn(client: StreamClient, shape: ServedShape, vocab_size: int, seed: int, into: Served) -> None:
    """Requests alone, then all streams at once; adds to `into`."""
    rng = random.Random(seed)
    for prompt in fresh_prompts(rng, shape.alone_repeats, shape.prompt_tokens, vocab_size):
        stream = await client.generate(prompt, shape.output_tokens)
        into.alone_ttft_s.append(stream.ttft_s)
        into.alone_gap_s += stream.gaps_s()
    prompts = fresh_prompts(rng, shape.streams, shape.prompt_tokens, vocab_size)
    began_s, cpu_s = time.perf_counter(), time.process_time()
    streams = await asyncio.gather(*(client.generate(prompt, shape.output_tokens) for prompt in prompts))
    into.client_cpu_share.append((time.process_time() - cpu_s) / (time.perf_counter() - began_s))
    into.tokens_per_s.append(tokens_per_s(streams))
    into.gap_s += [gap for stream in streams for gap in stream.gaps_s()]


async def warm_up(client: StreamClient, vocab_size: int) -> None:
    """A short batch and a long prompt, not counted."""
    rng = random.Random(0)
    prompts = [fresh_prompts(rng, 1, length, vocab_size)[0] for length in WARM_UP_PROMPTS]
    await asyncio.gather(*(client.generate(prompt, WARM_UP_OUTPUT) for prompt in prompts))


def with_pool(options: Sequence[str]) -> tuple[str, ...]:
    """`options`, with the size of each worker's pool if they do not say it."""
    return tuple(options) if "--kv-blocks" in options else ("--kv-memory", KV_MEMORY, *options)


@contextlib.asynccontextmanager
async def tandem_turns(model: Path, server: Server) -> AsyncIterator[Turn]:
    """`tandem serve` until the block ends. Raises RuntimeError if it does not get ready."""
    with contextlib.ExitStack() as stack:
        cluster = await asyncio.to_thread(
            stack.enter_context, serve(str(model), *with_pool(server.options), checkout=server.checkout)
        )
        async with AsyncClient(cluster.target) as client:
            await client.wait_ready(timeout_s=_READY_TIMEOUT_S)

            @contextlib.asynccontextmanager
            async def turn() -> AsyncIterator[StreamClient]:
                yield TandemStreams(client)

            yield turn


@contextlib.asynccontextmanager
async def vllm_turns(model: Path, cores: Sequence[int], vllm_python: Path) -> AsyncIterator[Turn]:
    """vLLM's server until the block ends. Raises PeerError if it does not get ready."""
    server = await asyncio.to_thread(VllmServer, model, cores, vllm_python, CONTEXT_TOKENS)
    try:
        await server.wait_ready()
        client = HttpStreams(server.port, MODEL)

        @contextlib.asynccontextmanager
        async def turn() -> AsyncIterator[StreamClient]:
            server.process.resume()
            try:
                yield client
            finally:
                server.process.pause()

        server.process.pause()
        yield turn
    finally:
        await asyncio.to_thread(server.process.close)


@contextlib.asynccontextmanager
async def open_servers(
    model: Path, tandem: Mapping[str, Server], cores: Sequence[int], vllm_python: Path | None
) -> AsyncIterator[dict[str, Turn]]:
    """Servers by name, until the block ends: Tandem's, and vLLM's if it is there."""
    async with contextlib.AsyncExitStack() as stack:
        turns: dict[str, Turn] = {}
        if vllm_python is not None:  # first: the others' heartbeats do not disturb its compiler
            turns[VLLM_SERVER] = await stack.enter_async_context(vllm_turns(model, cores, vllm_python))
        for name, server in tandem.items():
            turns[name] = await stack.enter_async_context(tandem_turns(model, server))
        yield turns


async def take_turns(turns: Mapping[str, Turn], rounds: int, measure: Measure, vocab_size: int) -> None:
    """Warms every server up, then calls `measure(name, client, round)` for each, round after round."""
    names = list(turns)
    for number in range(-1, rounds):
        first = number % len(names)
        for name in (*names[first:], *names[:first]):
            async with turns[name]() as client:
                await asyncio.sleep(_SETTLE_S)  # whoever had the last turn comes to rest
                if number < 0:
                    await warm_up(client, vocab_size)
                else:
                    await measure(name, client, number)
