"""Workers of several models or KV layouts under one name: an answer is one set's, and one set serves."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families

from router.serving_set import TAKE_OVER_S
from tandem.errors import Reason, Unavailable
from tandem.rpc.google_messages import RetryInfo, Status, unpacked
from tandem.types import Role

PROMPT = (72, 105)
LENGTH = 12
NEW = {"model_fingerprint": "new weights"}
OTHERS = [NEW, {"layout_fingerprint": "int8"}]


def samples(cluster: Any) -> list[Any]:
    """What the router's metrics say now."""
    families = text_string_to_metric_families(cluster.router.metrics.exposition()[0].decode())
    return [each for family in families for each in family.samples]


async def standing_at(cluster: Any, worker: Any, at: int = 3, **sampling: Any) -> Any:
    """A stream that has some tokens, and gets no more from its decode worker."""
    worker.pause_at(at)
    call = cluster.generate(*PROMPT, max_tokens=LENGTH, **sampling)
    await cluster.until(lambda: worker.offsets == [at] * sampling.get("n", 1))
    return call


@pytest.mark.parametrize("other", OTHERS)
async def test_a_stream_does_not_go_on_with_another_model(cluster: Any, other: dict[str, str]) -> None:
    _, decode = await cluster.add_pair()
    call = await standing_at(cluster, decode)
    new = [await cluster.add(role, name, **other) for role, name in ((Role.PREFILL, "p1"), (Role.DECODE, "d1"))]
    await decode.die()
    error, code, tokens = await cluster.error_of(call)
    assert code is grpc.StatusCode.UNAVAILABLE
    assert isinstance(error, Unavailable)
    assert error.reason is Reason.MODEL_CHANGED
    assert tokens == cluster.completion(PROMPT, len(tokens))
    assert not any(each.specs for each in new)
    failures = [each for each in samples(cluster) if each.name == "tandem_request_failures_total" and each.value]
    assert [each.labels["reason"] for each in failures] == ["MODEL_CHANGED"]
    details = dict(await call.trailing_metadata())["grpc-status-details-bin"]
    assert unpacked(Status.FromString(details).details, RetryInfo) is not None


async def test_a_stream_waits_for_a_worker_that_is_equal_to_its_first(launch: Any, policy: Any) -> None:
    cluster = await launch(policy=policy(patience_s=60.0))
    _, decode = await cluster.add_pair()
    call = await standing_at(cluster, decode)
    for role, name in ((Role.PREFILL, "p1"), (Role.DECODE, "d1")):
        await cluster.add(role, name, **NEW)
    await decode.die()
    await cluster.until(lambda: decode.info not in [view.info for view in cluster.router.workers.views()])
    await cluster.add(Role.DECODE, "d2")
    assert await cluster.read_tokens(call) == cluster.completion(PROMPT, LENGTH)
    assert not cluster.workers["d1"].specs


async def test_before_its_first_token_a_request_may_go_to_any_model(launch: Any, policy: Any) -> None:
    cluster = await launch(policy=policy(patience_s=60.0))
    prefill, decode = await cluster.add_pair()
    prefill.hold("prefill")
    call = cluster.generate(*PROMPT, max_tokens=LENGTH, timeout_s=60.0)
    await cluster.until(lambda: not prefill.idle)
    new = await cluster.add(Role.ELASTIC, "e1", **NEW)
    await prefill.die()
    assert await cluster.read_tokens(call) == cluster.completion(PROMPT, LENGTH)
    assert (len(new.specs), decode.specs) == (1, [])


async def test_a_worker_of_another_set_gets_no_requests_and_is_named(cluster: Any) -> None:
    await cluster.add_pair()
    await cluster.add(Role.DECODE, "d1")
    odd = await cluster.add(Role.ELASTIC, "e1", layout_fingerprint="int8")
    for _ in range(8):
        assert await cluster.read_tokens(cluster.generate(*PROMPT)) == cluster.completion(PROMPT, 8)
    assert not odd.specs
    apart = {each.info.worker_id: each.set_apart for each in cluster.router.status.cluster().workers}
    assert [name for name, why in apart.items() if why] == ["e1"]
    assert "layout_fingerprint" in apart["e1"]
    assert "--kv-dtype" in apart["e1"]
    states = [each for each in samples(cluster) if each.name == "tandem_router_workers" and each.value]
    assert {"worker_role": "elastic", "state": "set_apart"}.items() <= next(
        each.labels for each in states if each.labels["worker_role"] == "elastic"
    ).items()


async def test_a_set_apart_is_told_to_its_worker_and_logged_once(
    cluster: Any, caplog: pytest.LogCaptureFixture
) -> None:
    await cluster.add_pair()
    calls = [
        cluster.register(cluster.worker_info(Role.DECODE, name, address="127.0.0.1:1", **NEW)) for name in ("d1", "d2")
    ]
    said = [(await call.read()).set_apart for call in calls]
    assert all("model_fingerprint" in each for each in said)
    logged = [str(vars(each)) for each in caplog.records if each.getMessage() == "worker set apart"]
    assert sorted(next(name for name in ("d1", "d2") if name in each) for each in logged) == ["d1", "d2"]


async def test_new_requests_go_to_the_new_set_once_it_is_the_larger(launch: Any, policy: Any) -> None:
    cluster = await launch(policy=policy(patience_s=60.0))
    _, decode = await cluster.add_pair()
    call = await standing_at(cluster, decode)
    await cluster.add(Role.PREFILL, "p1", **NEW)
    new = [await cluster.add(Role.DECODE, f"new{number}", **NEW) for number in range(2)]
    await cluster.until(lambda: cluster.router.workers.serving.current.model_fingerprint == "new weights")
    assert await cluster.read_tokens(cluster.generate(*PROMPT)) == cluster.completion(PROMPT, 8)
    assert sum(len(each.specs) for each in new) == 1
    decode.let_go()
    assert await cluster.read_tokens(call) == cluster.completion(PROMPT, LENGTH)
    assert len(decode.specs) == 1


async def test_only_the_pinned_model_serves(launch: Any, policy: Any) -> None:
    cluster = await launch(policy=policy(patience_s=TAKE_OVER_S / 100), model_fingerprint="0123456789")
    await cluster.add_pair()
    error, _, _ = await cluster.error_of(cluster.generate(*PROMPT))
    assert "0123456789" in error.message
    pinned = await cluster.add(Role.ELASTIC, "e1", model_fingerprint="0123456789abcdef")
    assert await cluster.read_tokens(cluster.generate(*PROMPT)) == cluster.completion(PROMPT, 8)
    assert len(pinned.specs) == 1


async def test_a_request_outlives_the_loss_of_any_number_of_workers(launch: Any, policy: Any) -> None:
    cluster = await launch(policy=policy(patience_s=2.0, max_retries=1, backoff_s=0.01))
    _, decode = await cluster.add_pair()
    call = await standing_at(cluster, decode)
    for number in range(1, 6):
        successor = await cluster.add(Role.DECODE, f"d{number}")
        successor.pause_at(3)
        await decode.die()
        await cluster.until(lambda successor=successor: bool(successor.specs))
        decode = successor
    decode.let_go()
    assert await cluster.read_tokens(call) == cluster.completion(PROMPT, LENGTH)


async def test_the_router_is_ready_while_another_set_is_about_to_take_over(launch: Any, policy: Any) -> None:
    cluster = await launch(policy=policy(patience_s=60.0))
    prefill, _ = await cluster.add_pair()
    serving = cluster.router.workers.serving
    await cluster.until(lambda: serving.current is not None)
    serving._first_s -= TAKE_OVER_S  # the router is no longer young
    new = await cluster.add(Role.ELASTIC, "e1", **NEW)
    await prefill.die()
    await cluster.until(lambda: serving.is_overtaken)
    assert cluster.router.workers.readiness() is None
    assert await cluster.read_tokens(cluster.generate(*PROMPT)) == cluster.completion(PROMPT, 8)
    assert len(new.specs) == 1
