"""Health tells the truth: SERVING only while a usable pair exists; SIGTERM loses nothing that runs."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench.support.cluster import Cluster, pid_of, serve
from tandem.client import Client
from tandem.types import Role

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
def own_cluster() -> Iterator[Cluster]:
    """A cluster that the test may break."""
    with serve("demo", "--prefill", "1", "--decode", "1") as cluster:
        yield cluster


def test_health_follows_the_loss_and_the_return_of_a_worker(own_cluster: Cluster) -> None:
    told: queue.Queue[int] = queue.Queue()
    with grpc.insecure_channel(own_cluster.target) as channel, Client(own_cluster.target) as client:
        client.wait_ready(timeout_s=30)
        watch = health_pb2_grpc.HealthStub(channel).Watch(
            health_pb2.HealthCheckRequest(service="tandem.v1.InferenceService")
        )
        listener = threading.Thread(target=lambda: _listen(watch, told))
        listener.start()
        assert told.get(timeout=10) == SERVING

        os.kill(pid_of(client, Role.PREFILL), signal.SIGKILL)

        assert told.get(timeout=5) == NOT_SERVING
        assert told.get(timeout=10) == SERVING
        watch.cancel()
        listener.join()


def _listen(watch: Iterator[health_pb2.HealthCheckResponse], told: queue.Queue[int]) -> None:
    try:
        for response in watch:
            told.put(response.status)
    except grpc.RpcError:
        return


def test_sigterm_under_load_lets_every_running_stream_finish(own_cluster: Cluster) -> None:
    first_tokens = threading.Semaphore(0)

    def stream(client: Client, seed: int) -> int:
        num_tokens = 0
        for update in client.generate("Once upon a time", max_tokens=200, seed=seed, ignore_eos=True):
            if num_tokens == 0:
                first_tokens.release()
            num_tokens += len(update.token_ids)
        return num_tokens

    with Client(own_cluster.target) as client, ThreadPoolExecutor(8) as callers:
        client.wait_ready(timeout_s=30)
        streams = [callers.submit(stream, client, seed) for seed in range(8)]
        for _ in streams:
            assert first_tokens.acquire(timeout=30)

        code = own_cluster.stop()

        assert [each.result(timeout=10) for each in streams] == [200] * 8
    assert code == 0


def test_a_router_out_of_descriptors_says_so_and_serves_those_who_are_connected() -> None:
    tandem = f'ulimit -n 256; exec "{sys.executable}" -m cli.main router --model demo --listen 127.0.0.1:0'
    command, pipe = ["sh", "-c", tandem], subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as router, contextlib.ExitStack() as held:
        assert router.stdout is not None
        assert router.stderr is not None
        try:
            host, port = router.stdout.readline().split()[1].split(":")
            client = held.enter_context(Client(f"{host}:{port}"))
            client.model(timeout_s=30)
            for _ in range(256):
                held.enter_context(socket.create_connection((host, int(port)), timeout=30))
            assert any("limit of open files" in line and "limit=256" in line for line in router.stderr)
            assert client.model(timeout_s=30).model == "demo"
        finally:
            router.kill()
