"""A real router's metrics, read as Prometheus reads them: every declared one, and true."""

from __future__ import annotations

from typing import Any

import grpc
from prometheus_client.parser import text_string_to_metric_families

from shell.telemetry import metric_names
from tandem.types import Role
from tandem.v1 import inference_pb2 as pb

PROMPT = (72, 105)


def samples(cluster: Any) -> list[Any]:
    """All that the router exposes now."""
    body, _ = cluster.router.metrics.exposition()
    return [each for family in text_string_to_metric_families(body.decode()) for each in family.samples]


def value(cluster: Any, name: str, **labels: str) -> float:
    """The one sample of this name and these labels."""
    (found,) = [each.value for each in samples(cluster) if each.name == name and labels.items() <= each.labels.items()]
    return float(found)


async def ends_counted(cluster: Any, code: str) -> None:
    """Returns once one Generate is counted as ended so: a caller may know before the handler has left."""
    labels = {"method": "Generate", "code": code}
    await cluster.until(
        lambda: (
            [
                each.value
                for each in samples(cluster)
                if each.name == "tandem_grpc_server_calls_total" and labels.items() <= each.labels.items()
            ]
            == [1]
        )
    )


async def test_a_generation_shows_in_every_figure_that_it_touches(cluster: Any) -> None:
    await cluster.add_pair()
    await cluster.read_tokens(cluster.generate(*PROMPT, max_tokens=8))
    assert value(cluster, "tandem_requests_total", outcome="length") == 1
    assert value(cluster, "tandem_prompt_tokens_total") == 2
    assert value(cluster, "tandem_completion_tokens_total") == 8
    assert value(cluster, "tandem_time_to_first_token_seconds_count") == 1
    assert value(cluster, "tandem_inter_token_seconds_count") == 7
    assert value(cluster, "tandem_request_placements_total", path="disaggregated") == 1
    await ends_counted(cluster, "OK")
    assert cluster.router.recent.activity().total_tokens == 8


async def test_a_running_request_is_active_and_in_flight(cluster: Any) -> None:
    _, decode = await cluster.add_pair()
    decode.hold("decode")
    call = cluster.generate(*PROMPT)
    await cluster.until(lambda: not decode.idle)
    assert value(cluster, "tandem_router_active_requests") == 1
    assert value(cluster, "vllm:num_requests_running") == 1
    assert value(cluster, "tandem_grpc_server_calls_in_flight", method="Generate") == 1
    decode.let_go()
    await cluster.read_tokens(call)


async def test_a_refused_request_is_told_by_reason_and_by_status(cluster: Any) -> None:
    _, code, _ = await cluster.error_of(cluster.inference.Generate(pb.GenerateRequest()))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert value(cluster, "tandem_requests_refused_total", reason="INVALID_FIELD") == 1
    await ends_counted(cluster, "INVALID_ARGUMENT")
    assert value(cluster, "tandem_requests_total", outcome="failed") == 0


async def test_workers_are_counted_by_role_and_state(cluster: Any) -> None:
    await cluster.add_pair("0")
    await cluster.add(Role.DECODE, "d1")
    cluster.router.workers.order_drain("d1")
    assert value(cluster, "tandem_router_workers", worker_role="decode", state="ready") == 1
    assert value(cluster, "tandem_router_workers", worker_role="decode", state="draining") == 1
    assert value(cluster, "tandem_router_workers", worker_role="prefill", state="ready") == 1
    assert value(cluster, "tandem_router_workers", worker_role="prefill", state="stalled") == 0


async def test_a_router_that_knows_no_worker_tells_zeros_for_an_alert_to_see(cluster: Any) -> None:
    states = {("tandem_router_workers", role, state) for role in Role for state in metric_names.WORKER_STATES}
    assert {
        (each.name, each.labels["worker_role"], each.labels["state"])
        for each in samples(cluster)
        if each.name == "tandem_router_workers" and each.value == 0
    } == states


async def test_serving_is_what_health_tells(cluster: Any) -> None:
    assert value(cluster, "tandem_serving") == 0
    await cluster.add_pair()
    await cluster.until(lambda: value(cluster, "tandem_serving") == 1)
    cluster.router.entrance.begin_drain()
    assert value(cluster, "tandem_draining") == 1
    await cluster.until(lambda: value(cluster, "tandem_serving") == 0)
