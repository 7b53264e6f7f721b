"""The router's faces for clients of other servers: KServe v2 / Triton, and vLLM's gRPC engine."""

from __future__ import annotations

from router.cluster_view import ClusterView
from router.entrance import Entrance
from router.faces.kserve.servicer import KserveServicer, kserve_service
from router.faces.vllm.info import ServerInfo
from router.faces.vllm.servicer import VllmServicer, vllm_service
from router.faces.vllm.tokenizer import TokenizerArchive
from router.health import Health
from tandem.checkpoint import CheckpointInfo
from tandem.clock import Clock
from tandem.config import RouterConfig
from tandem.rpc.server import Service


def foreign_services(
    checkpoint: CheckpointInfo,
    config: RouterConfig,
    entrance: Entrance,
    health: Health,
    view: ClusterView,
    clock: Clock,
) -> tuple[Service, ...]:
    """Wired over the same rooms as InferenceService."""
    kserve = KserveServicer(checkpoint.name, entrance, health, clock, config.limits)
    info = ServerInfo(checkpoint, config.limits, view, config.max_active_requests)
    vllm = VllmServicer(entrance, health, info, TokenizerArchive(checkpoint.path))
    return kserve_service(kserve), vllm_service(vllm)
