"""Calling a Tandem server from Python: `AsyncClient` for asyncio, `Client` for everything else.

Both speak plain dataclasses and raise the exceptions of `tandem.errors`; nobody above this
package sees protobuf or grpc.
"""

from tandem.client.aio import AsyncClient
from tandem.client.request import ChatOptions, GenerateOptions, Message, SamplingOptions, ToolCall
from tandem.client.results import (
    Choice,
    Completion,
    GenerationUpdate,
    ServedModel,
    Timings,
    Tokenization,
    Usage,
)
from tandem.client.sync import Client
from tandem.cluster_status import ClusterStatus, RecentActivity, WorkerStatus
from tandem.security.options import ClientSecurityConfig

__all__ = [
    "AsyncClient",
    "ChatOptions",
    "Choice",
    "Client",
    "ClientSecurityConfig",
    "ClusterStatus",
    "Completion",
    "GenerateOptions",
    "GenerationUpdate",
    "Message",
    "RecentActivity",
    "SamplingOptions",
    "ServedModel",
    "Timings",
    "Tokenization",
    "ToolCall",
    "Usage",
    "WorkerStatus",
]
