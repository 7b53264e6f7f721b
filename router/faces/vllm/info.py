"""What the VllmEngine face tells about the model, the server and its load."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from router.cluster_view import ClusterView
from tandem import __version__
from tandem.checkpoint import CheckpointInfo
from tandem.cluster_status import ClusterStatus
from tandem.foreign import vllm_engine_pb2
from tandem.limits import Limits
from tandem.types import Role

_SERVER_TYPE = "vllm-grpc"
"""The protocol's kind: clients label servers by it."""
_MAX_INT32 = 2**31 - 1


class ServerInfo:
    """Reads the cluster's status when asked."""

    def __init__(
        self,
        checkpoint: CheckpointInfo,
        limits: Limits,
        view: ClusterView,
        max_active_requests: int,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._checkpoint = checkpoint
        self._limits = limits
        self._view = view
        self._max_active_requests = max_active_requests
        self._wall_clock = wall_clock
        self._last_request_s = 0.0
        self._config = _read_config(checkpoint.path)

    def request_came(self) -> None:
        """For `last_receive_timestamp`."""
        self._last_request_s = self._wall_clock()

    def model(self) -> vllm_engine_pb2.GetModelInfoResponse:
        """For GetModelInfo. Where the model lies on disk is not told."""
        info = self._checkpoint
        defaults = dict(info.generation_defaults)
        return vllm_engine_pb2.GetModelInfoResponse(
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

    def server(self, *, draining: bool) -> vllm_engine_pb2.GetServerInfoResponse:
        """For GetServerInfo."""
        status = self._view.status()
        blocks = [worker.load.pool.block_size for worker in status.workers if worker.info.role is Role.DECODE]
        return vllm_engine_pb2.GetServerInfoResponse(
            active_requests=status.active_requests,
            is_paused=draining,
            last_receive_timestamp=self._last_request_s,
            uptime_seconds=status.uptime_s,
            server_type=_SERVER_TYPE,
            data_parallel_size=1,
            block_size=max(blocks, default=0),
            max_num_seqs=self._max_active_requests,
        )

    def loads(self) -> vllm_engine_pb2.GetLoadsResponse:
        """For GetLoads: router and decode workers as one rank."""
        return vllm_engine_pb2.GetLoadsResponse(
            timestamp=datetime.fromtimestamp(self._wall_clock(), UTC).isoformat(),
            version=__version__,
            dp_rank_count=1,
            loads=[self._load(self._view.status())],
        )

    def _load(self, status: ClusterStatus) -> vllm_engine_pb2.SchedulerLoad:
        pools = [worker.load.pool for worker in status.workers if worker.info.role is Role.DECODE]
        total = sum(pool.total * pool.block_size for pool in pools)
        used = sum((pool.total - pool.free - pool.cached) * pool.block_size for pool in pools)
        return vllm_engine_pb2.SchedulerLoad(
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


def _read_config(checkpoint: Path) -> dict[str, Any]:
    """Already judged by `tandem.checkpoint`, which keeps only what Tandem itself needs."""
    config: dict[str, Any] = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    return config
