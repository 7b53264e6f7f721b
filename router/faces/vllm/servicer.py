"""vLLM's VllmEngine: a thin face over the entrance, in token ids. Errors are raised as TandemErrors.

The protocol is described in protos/tandem/foreign/vllm_engine.proto.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import time
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from typing import Any

import grpc.aio

from models.files.checkpoint import CheckpointInfo
from models.files.gguf import read_gguf
from models.files.gguf_tokenizer import gguf_settings
from models.files.tokenizer_file import read_tokenizer
from router.entrance import Entrance, RunningRequest
from router.faces.refused_methods import partial_service
from router.faces.vllm.answer import ABORTED, Answer
from router.faces.vllm.request import check_rank, read_request
from router.request import Caller
from router.status import RouterStatus
from shell.config import RouterConfig
from shell.rpc.authentication import caller_identity
from shell.rpc.server import Service
from shell.telemetry.trace_context import trace_of_call
from tandem import __version__
from tandem.cluster_status import ClusterStatus
from tandem.errors import TandemError
from tandem.foreign import smg_common_pb2, vllm_engine_pb2_grpc
from tandem.foreign import vllm_engine_pb2 as pb

SERVICE_NAME = "vllm.grpc.engine.VllmEngine"
"""Name of the service in its protocol."""
_SERVER_TYPE = "vllm-grpc"
"""Kind of the protocol: clients label servers by this name."""
_MAX_INT32 = 2**31 - 1
_ABORTED = "aborted by its id"
Context = grpc.aio.ServicerContext[Any, Any]
_CHUNK_BYTES = 64 * 1024
_PATTERNS = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("config.json", "generation_config.json", "chat_template.json", "*.jinja"),
    *("vocab.json", "merges.txt", "*.model", "*.tiktoken"),
)
_EPOCH = (1980, 1, 1, 0, 0, 0)
"""The earliest time that a ZIP entry can have."""
_PROBES = ("HealthCheck", "GetModelInfo", "GetServerInfo", "GetLoads")
_REFUSED = {
    "Embed": "the model generates text and has no embeddings",
    "FlushCache": "workers drop cached prefixes when they need room; requests of a new cache salt find none",
    "StartProfile": "profiles of a process are taken from outside, with perf or py-spy",
    "StopProfile": "profiles of a process are taken from outside, with perf or py-spy",
    "SubscribeKvEvents": "workers publish them themselves, with --kv-events",
}


class RequestAborted(TandemError):
    """Somebody ended the request by its id; its own caller is answered, not refused."""


class Aborts:
    """Requests that Abort can end, by the ids that their callers chose. An id may run more than once."""

    def __init__(self) -> None:
        self._listed: dict[str, list[asyncio.Future[None]]] = {}

    @contextmanager
    def listed(self, request_id: str) -> Iterator[asyncio.Future[None]]:
        """While inside, from before the prompt is read, `abort` of the id resolves the future."""
        aborted = asyncio.get_running_loop().create_future()
        same_id = self._listed.setdefault(request_id, [])
        same_id.append(aborted)
        try:
            yield aborted
        finally:
            same_id.remove(aborted)
            if not same_id:
                del self._listed[request_id]

    def abort(self, request_ids: Iterable[str]) -> None:
        """Ends requests under way. Other ids are passed over, and so is "", by which many may be listed."""
        for request_id in filter(None, request_ids):
            for aborted in self._listed.get(request_id, ()):
                if not aborted.done():
                    aborted.set_result(None)


class VllmServicer(vllm_engine_pb2_grpc.VllmEngineServicer):
    """Serves a model to gateways for vLLM."""

    def __init__(
        self, checkpoint: CheckpointInfo, config: RouterConfig, entrance: Entrance, status: RouterStatus
    ) -> None:
        self._checkpoint = checkpoint
        self._config = config
        self._entrance = entrance
        self._status = status
        self._aborts = Aborts()
        self._last_request_s = 0.0
        self._tokenizer = b""
        """Archive of the tokenizer's files, made at the first GetTokenizer."""
        self._archiving = asyncio.Lock()

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:
        """Chunks if asked for, then each choice whole. A slow reader only makes later chunks bigger."""
        self._last_request_s = time.time()
        with self._entrance.judging():
            completion = read_request(request)
        trace = trace_of_call(context.invocation_metadata())
        caller = Caller(context.time_remaining(), *trace, context.peer(), caller_identity().max_priority)
        with self._aborts.listed(completion.request_id) as aborted:
            async with self._entrance.run(completion, caller) as running:
                if aborted.done():
                    running.cancel(RequestAborted(_ABORTED))
                aborted.add_done_callback(lambda _: running.cancel(RequestAborted(_ABORTED)))
                num_choices = completion.sampling.n or 1
                for final in await _read(running, context, num_choices, streamed=request.stream):
                    await context.write(final)

    async def HealthCheck(self, request: pb.HealthCheckRequest, context: Context) -> pb.HealthCheckResponse:
        """As the health service says, with the reason."""
        obstacle = self._status.obstacle()
        return pb.HealthCheckResponse(healthy=obstacle is None, message=obstacle or "")

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        """Ends requests of this service and releases what they hold, also where nobody reads their answers."""
        self._aborts.abort(request.request_ids)
        return pb.AbortResponse()

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Context) -> pb.GetModelInfoResponse:
        """Describes the served model, except its path on disk."""
        info = self._checkpoint
        defaults = dict(info.generation_defaults)
        return pb.GetModelInfoResponse(
            model_path=info.name,
            is_generation=True,
            max_context_length=info.context_tokens,
            vocab_size=info.vocab_size,
            served_model_name=info.name,
            tokenizer_path=info.name,
            model_type=info.family,
            architectures=[str(each) for each in self._checkpoint.config.get("architectures") or ()],
            eos_token_ids=sorted(info.eos_token_ids),
            pad_token_id=self._token_id("pad_token_id"),
            bos_token_id=self._token_id("bos_token_id"),
            max_req_input_len=min(info.context_tokens - 1, self._config.limits.max_prompt_tokens),
            default_sampling_params_json=json.dumps(defaults) if defaults else "",
        )

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Context) -> pb.GetServerInfoResponse:
        """Describes the server."""
        status = self._status.cluster()
        blocks = [worker.load.pool.block_size for worker in status.workers if worker.info.role.decodes]
        return pb.GetServerInfoResponse(
            active_requests=status.active_requests,
            is_paused=self._entrance.draining,
            last_receive_timestamp=self._last_request_s,
            uptime_seconds=status.uptime_s,
            server_type=_SERVER_TYPE,
            data_parallel_size=1,
            block_size=max(blocks, default=0),
            max_num_seqs=self._status.max_active_requests,
        )

    async def GetLoads(self, request: pb.GetLoadsRequest, context: Context) -> pb.GetLoadsResponse:
        """How busy router and decode workers are, as one rank. Raises InvalidRequest for another rank than 0."""
        check_rank("dp_rank", request.dp_rank)
        return pb.GetLoadsResponse(
            timestamp=datetime.fromtimestamp(time.time(), UTC).isoformat(),
            version=__version__,
            dp_rank_count=1,
            loads=[self._load(self._status.cluster())],
        )

    async def GetTokenizer(self, request: smg_common_pb2.GetTokenizerRequest, context: Context) -> None:
        """The tokenizer's files."""
        async with self._archiving:
            if not self._tokenizer:
                self._tokenizer = await asyncio.to_thread(_archive, self._checkpoint)
        for chunk in _chunks(self._tokenizer):
            await context.write(chunk)

    def _load(self, status: ClusterStatus) -> pb.SchedulerLoad:
        pools = [worker.load.pool for worker in status.workers if worker.info.role.decodes]
        total = sum(pool.total * pool.block_size for pool in pools)
        used = sum(pool.num_used * pool.block_size for pool in pools)
        return pb.SchedulerLoad(
            num_running_reqs=status.active_requests,
            num_waiting_reqs=status.queued_requests,
            num_total_reqs=status.active_requests + status.queued_requests,
            num_used_tokens=min(used, _MAX_INT32),
            max_total_num_tokens=min(total, _MAX_INT32),
            token_usage=used / total if total else 0.0,
            gen_throughput=status.recent.tokens_per_s,
            utilization=used / total if total else 0.0,
            max_running_requests=self._status.max_active_requests,
            num_waiting_uncached_tokens=min(status.queued_tokens, _MAX_INT32),
        )

    def _token_id(self, key: str) -> int:
        value = self._checkpoint.config.get(key)
        return value if isinstance(value, int) and 0 <= value <= _MAX_INT32 else 0


async def _read(
    running: RunningRequest, context: Context, num_choices: int, *, streamed: bool
) -> Iterable[pb.GenerateResponse]:
    """Reads all choices to their end; writes chunks until then if wanted. Returns each choice whole, by index."""
    answers = [Answer(index, running.prompt_token_ids, streamed=streamed) for index in range(num_choices)]
    finals: dict[int, pb.GenerateResponse] = {}
    while len(finals) < num_choices:
        try:
            output = await running.delivery.get()
        except RequestAborted:
            return [finals.get(index) or answer.complete(ABORTED) for index, answer in enumerate(answers)]
        answer = answers[output.index]
        chunk = answer.add(output, running.timeline.cached_tokens)
        if chunk is not None:
            await context.write(chunk)
        if output.finish_reason is not None:
            finals[output.index] = answer.complete(output.finish_reason, output.matched_stop)
    return [finals[index] for index in range(num_choices)]


def _archive(checkpoint: CheckpointInfo) -> bytes:
    """Returns the tokenizer's files as a ZIP archive, for gateways that tokenize by themselves.

    The archive is a function of the files: replicas of a router give the same bytes. Weights are never in it. In the
    place of a GGUF file's own tokenizer stand the files that say the same.
    """
    texts = checkpoint.texts
    files = {file.name: file.read_bytes() for pattern in _PATTERNS for file in texts.glob(pattern) if file.is_file()}
    if texts.is_file():
        settings = {"tokenizer_config.json": gguf_settings(read_gguf(texts)), "config.json": dict(checkpoint.config)}
        files = {name: json.dumps(each).encode() for name, each in settings.items()}
        files["tokenizer.json"] = read_tokenizer(texts).to_str().encode()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in sorted(files.items()):
            entry = zipfile.ZipInfo(name, date_time=_EPOCH)
            archive.writestr(entry, content, compress_type=zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def _chunks(data: bytes) -> Iterator[smg_common_pb2.GetTokenizerChunk]:
    """Yields the chunks of an archive in order; the last chunk carries the archive's SHA-256."""
    fingerprint = hashlib.sha256(data).hexdigest()
    for start in range(0, len(data), _CHUNK_BYTES):
        is_last = start + _CHUNK_BYTES >= len(data)
        yield smg_common_pb2.GetTokenizerChunk(
            data=data[start : start + _CHUNK_BYTES], sha256=fingerprint if is_last else ""
        )


def vllm_service(servicer: VllmServicer) -> Service:
    """With what of the protocol is refused by name."""
    return partial_service(
        SERVICE_NAME, partial(vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server, servicer), _REFUSED, _PROBES
    )
