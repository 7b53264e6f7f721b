"""What a request says stays out of logs and errors, at the debug level too, on good ways and bad ones."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator

import grpc
import pytest

from bench.support.cluster import Cluster, becomes_idle, eventually, pid_of, serve
from tandem.client import Client, Message
from tandem.errors import TandemError
from tandem.types import Role
from tandem.v1 import inference_pb2, inference_pb2_grpc

MARKER = "xyzzy-plugh-17"
PROMPT = f"Once upon a time {MARKER} said that {MARKER} was"
TIMEOUT_S = 30.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Talkative, and so small that what is long enough has to wait or be preempted."""
    options = ("--log-level", "debug", "--kv-blocks", "72", "--max-seqs", "4", "--max-queued-requests", "4")
    with serve("demo", *options) as cluster:
        yield cluster


@pytest.fixture
def client(cluster: Cluster) -> Iterator[Client]:
    with Client(cluster.target) as client:
        client.wait_ready(TIMEOUT_S)
        yield client


Case = Callable[[Client], object]


def message(content: str, role: str = "user") -> list[Message]:
    return [{"role": role, "content": content}]


SERVED: dict[str, Case] = {
    "text": lambda client: client.complete(PROMPT, max_tokens=8),
    "chat": lambda client: client.complete(messages=message(PROMPT), max_tokens=8),
    "stop string": lambda client: client.complete(PROMPT, max_tokens=8, stop=[MARKER]),
    "cache salt": lambda client: client.complete(PROMPT, max_tokens=2, cache_salt=MARKER),
    "schema": lambda client: client.complete(PROMPT, json_schema=f'{{"const": "{MARKER}"}}', max_tokens=40),
    "grammar": lambda client: client.complete(PROMPT, grammar=f'start: "{MARKER}"', max_tokens=40),
    "choices": lambda client: client.complete(PROMPT, choice=[MARKER], max_tokens=40),
    "tokenize": lambda client: client.tokenize(PROMPT),
}
REFUSED: dict[str, Case] = {
    "wrong value": lambda client: client.complete(PROMPT, temperature=-1.0),
    "empty stop": lambda client: client.complete(PROMPT, stop=[MARKER, ""]),
    "too long for the model": lambda client: client.complete(PROMPT * 200),
    "too many bytes": lambda client: client.complete(PROMPT * 100_000),
    "too long for the pool": lambda client: client.complete(PROMPT * 12, max_tokens=900),
    "another model": lambda client: client.complete(PROMPT, model=MARKER),
    "schema": lambda client: client.complete(PROMPT, json_schema=f'{{"type": "{MARKER}"}}'),
    "grammar": lambda client: client.complete(PROMPT, grammar=f'start: "{MARKER}'),
    "expression": lambda client: client.complete(PROMPT, regex=f"({MARKER}"),
    "choices": lambda client: client.complete(PROMPT, choice=[MARKER, "a" * 100_000]),
    "a role that templates refuse": lambda client: client.complete(messages=message(PROMPT, role=MARKER) * 300),
    "no time": lambda client: client.complete(PROMPT, max_tokens=300, ignore_eos=True, timeout_s=0.05),
}


@pytest.mark.parametrize("case", SERVED)
def test_nothing_of_a_served_request_is_logged(cluster: Cluster, client: Client, case: str) -> None:
    SERVED[case](client)

    assert becomes_idle(client)
    assert_unsaid(cluster)


@pytest.mark.parametrize("case", REFUSED)
def test_nothing_of_a_refused_request_is_logged_or_told_back(cluster: Cluster, client: Client, case: str) -> None:
    with pytest.raises(TandemError) as refused:
        REFUSED[case](client)

    assert becomes_idle(client)
    cause = refused.value.__cause__
    assert isinstance(cause, grpc.RpcError)
    said = f"{refused.value} {refused.value.message} {cause.details()} {cause.trailing_metadata()}"
    assert MARKER not in said
    assert_unsaid(cluster)


def test_bytes_that_are_no_text_are_refused_without_repeating_them(cluster: Cluster) -> None:
    text_field = bytes([3 << 3 | 2, len(MARKER) + 1]) + MARKER.encode() + b"\xff"
    with grpc.insecure_channel(cluster.target) as channel:
        call = channel.unary_stream("/tandem.v1.InferenceService/Generate", request_serializer=lambda raw: raw)
        with pytest.raises(grpc.RpcError) as refused:
            list(call(text_field, timeout=TIMEOUT_S))

    assert MARKER not in str(refused.value.details())
    assert MARKER.encode() not in str(refused.value.trailing_metadata()).encode()
    assert_unsaid(cluster)


def test_nothing_is_logged_of_requests_that_are_cancelled_or_too_many(cluster: Cluster, client: Client) -> None:
    """Some run, some wait, some are preempted, some are turned away, all are cancelled."""
    stub = inference_pb2_grpc.InferenceServiceStub(channel := grpc.insecure_channel(cluster.target))
    request = inference_pb2.GenerateRequest(text=PROMPT, request_id="many")
    request.sampling.max_tokens = 500
    request.sampling.ignore_eos = True
    calls: list[grpc.Call] = []

    def some_run() -> bool:
        calls.extend(stub.Generate(request, timeout=TIMEOUT_S) for _ in range(24))
        return client.status().active_requests > 4

    assert eventually(some_run)  # more are sent until then: whoever looks may be late
    for call in calls:
        call.cancel()
    channel.close()

    assert becomes_idle(client, TIMEOUT_S)
    assert_unsaid(cluster)


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_nothing_is_logged_of_requests_whose_worker_dies(cluster: Cluster, client: Client, role: Role) -> None:
    updates = client.generate(PROMPT, max_tokens=200, ignore_eos=True, timeout_s=TIMEOUT_S)
    next(updates)
    os.kill(pid_of(client, role), signal.SIGKILL)
    with contextlib.suppress(TandemError):
        list(updates)

    client.wait_ready(TIMEOUT_S)
    assert becomes_idle(client, TIMEOUT_S)
    assert_unsaid(cluster)


def assert_unsaid(cluster: Cluster) -> None:
    """Neither the marker nor the rest of the prompt lies in what the processes wrote, which is a lot."""
    log = "".join(cluster.log)
    assert " debug " in log
    assert MARKER not in log
    assert "Once upon a time" not in log
