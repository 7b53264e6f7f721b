"""What the VllmEngine face tells about the model, its tokenizer, the server and its load."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import time
import zipfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from router.status import RouterStatus
from tandem import __version__
from tandem.checkpoint import CheckpointInfo
from tandem.cluster_status import ClusterStatus
from tandem.foreign import smg_common_pb2
from tandem.foreign import vllm_engine_pb2 as pb
from tandem.limits import Limits
from tandem.types import Role

_SERVER_TYPE = "vllm-grpc"
"""The protocol's kind: clients label servers by it."""
_MAX_INT32 = 2**31 - 1
_CHUNK_BYTES = 64 * 1024
_PATTERNS = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("config.json", "generation_config.json", "chat_template.json", "*.jinja"),
    *("vocab.json", "merges.txt", "*.model", "*.tiktoken"),
)
_EPOCH = (1980, 1, 1, 0, 0, 0)
"""The earliest time that a ZIP entry can have."""


class ServerInfo:
    """Reads the cluster's status when asked."""

    def __init__(
        self, checkpoint: CheckpointInfo, limits: Limits, max_active_requests: int, status: RouterStatus
    ) -> None:
        self._checkpoint = checkpoint
        self._limits = limits
        self._max_active_requests = max_active_requests
        self._status = status
        self._last_request_s = 0.0
        config = (checkpoint.path / "config.json").read_text(encoding="utf-8")
        self._config: dict[str, Any] = json.loads(config)
        """With what `CheckpointInfo` leaves out because Tandem itself does not need it."""
        self._archive = b""
        self._archiving = asyncio.Lock()

    def request_came(self) -> None:
        """For `last_receive_timestamp`."""
        self._last_request_s = time.time()

    def model(self) -> pb.GetModelInfoResponse:
        """For GetModelInfo. Where the model lies on disk is not told."""
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
            architectures=[str(each) for each in self._config.get("architectures") or ()],
            eos_token_ids=sorted(info.eos_token_ids),
            pad_token_id=self._token_id("pad_token_id"),
            bos_token_id=self._token_id("bos_token_id"),
            max_req_input_len=min(info.context_tokens - 1, self._limits.max_prompt_tokens),
            default_sampling_params_json=json.dumps(defaults) if defaults else "",
        )

    def server(self, *, draining: bool) -> pb.GetServerInfoResponse:
        """For GetServerInfo."""
        status = self._status.cluster()
        blocks = [worker.load.pool.block_size for worker in status.workers if worker.info.role is Role.DECODE]
        return pb.GetServerInfoResponse(
            active_requests=status.active_requests,
            is_paused=draining,
            last_receive_timestamp=self._last_request_s,
            uptime_seconds=status.uptime_s,
            server_type=_SERVER_TYPE,
            data_parallel_size=1,
            block_size=max(blocks, default=0),
            max_num_seqs=self._max_active_requests,
        )

    def loads(self) -> pb.GetLoadsResponse:
        """For GetLoads: router and decode workers as one rank."""
        return pb.GetLoadsResponse(
            timestamp=datetime.fromtimestamp(time.time(), UTC).isoformat(),
            version=__version__,
            dp_rank_count=1,
            loads=[self._load(self._status.cluster())],
        )

    async def tokenizer(self) -> Iterator[smg_common_pb2.GetTokenizerChunk]:
        """For GetTokenizer: its files as a ZIP archive in order; the last chunk carries the archive's SHA-256.

        The archive is made once, when it is first asked for.
        """
        async with self._archiving:
            if not self._archive:
                self._archive = await asyncio.to_thread(_archive, self._checkpoint.path)
        return _split(self._archive)

    def _load(self, status: ClusterStatus) -> pb.SchedulerLoad:
        pools = [worker.load.pool for worker in status.workers if worker.info.role is Role.DECODE]
        total = sum(pool.total * pool.block_size for pool in pools)
        used = sum((pool.total - pool.free - pool.cached) * pool.block_size for pool in pools)
        return pb.SchedulerLoad(
            num_running_reqs=status.active_requests,
            num_waiting_reqs=status.queued_requests,
            num_total_reqs=status.active_requests + status.queued_requests,
            num_used_tokens=min(used, _MAX_INT32),
            max_total_num_tokens=min(total, _MAX_INT32),
            token_usage=used / total if total else 0.0,
            gen_throughput=status.recent.tokens_per_s,
            utilization=used / total if total else 0.0,
            max_running_requests=self._max_active_requests,
            num_waiting_uncached_tokens=min(status.queued_tokens, _MAX_INT32),
        )

    def _token_id(self, key: str) -> int:
        value = self._config.get(key)
        return value if isinstance(value, int) and 0 <= value <= _MAX_INT32 else 0


def _archive(checkpoint: Path) -> bytes:
    """A function of the files: replicas of a router give the same bytes. Weights are never in it."""
    files = sorted({file for pattern in _PATTERNS for file in checkpoint.glob(pattern) if file.is_file()})
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in files:
            entry = zipfile.ZipInfo(file.name, date_time=_EPOCH)
            archive.writestr(entry, file.read_bytes(), compress_type=zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def _split(data: bytes) -> Iterator[smg_common_pb2.GetTokenizerChunk]:
    fingerprint = hashlib.sha256(data).hexdigest()
    for start in range(0, len(data), _CHUNK_BYTES):
        is_last = start + _CHUNK_BYTES >= len(data)
        yield smg_common_pb2.GetTokenizerChunk(
            data=data[start : start + _CHUNK_BYTES], sha256=fingerprint if is_last else ""
        )
