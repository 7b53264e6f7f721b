import argparse
import asyncio
import socket
from contextlib import nullcontext
from typing import Any

import pytest

from cli.serve import (
    _Server,
    check_fleet,
    check_host_memory,
    fleet_devices,
    router_spec,
    with_loans,
    worker_specs,
)
from shell.config import DecodeConfig, PrefillConfig, RouterConfig, ServeConfig, add_arguments, load
from shell.rpc.address import local_address
from tandem.errors import ConfigError

ROUTERS = ("127.0.0.1:7",)


def parsed(cls: Any, *argv: str) -> Any:
    parser = argparse.ArgumentParser()
    add_arguments(parser, cls)
    return load(cls, parser.parse_args(argv), {})


def serve(*argv: str) -> ServeConfig:
    config: ServeConfig = parsed(ServeConfig, *argv)
    return config


def test_the_arguments_of_a_child_give_it_the_options_of_serve() -> None:
    config = serve("--model", "m", "--block-size", "32", "--prefill", "1", "--decode", "2")
    prefill, *decodes = worker_specs(config, (0, 1, 2, 3), ROUTERS, fleet_devices(config, ()))
    first: PrefillConfig = parsed(PrefillConfig, *prefill.arguments)
    assert (first.model, first.block_size) == ("m", 32)
    assert (first.router, first.worker_id, first.threads) == (("127.0.0.1:7",), "prefill-0", 2)
    second: DecodeConfig = parsed(DecodeConfig, *decodes[1].arguments)
    assert (second.worker_id, second.block_size, second.threads) == ("decode-1", 32, 1)


@pytest.mark.parametrize(
    ("num_workers", "cores", "loans"),
    [
        (2, (0, 1, 2, 3), ["/ledger:2,3", "/ledger:0,1"]),
        (3, (0, 1, 2), ["/ledger:2", "/ledger:0", "/ledger:1"]),
        (3, (0, 1), [None, None, None]),
        (1, (0, 1), [None]),
    ],
)
def test_each_worker_may_borrow_cores_of_one_other_if_no_core_is_shared(
    num_workers: int, cores: tuple[int, ...], loans: list[str | None]
) -> None:
    config = serve("--workers", str(num_workers))
    specs = worker_specs(config, cores, ROUTERS, fleet_devices(config, ()))
    assert [spec.loan for spec in with_loans(specs, "/ledger")] == loans


def test_workers_listen_on_loopback_whatever_the_router_does() -> None:
    config = serve("--listen", "0.0.0.0:50051", "--prefill", "1")
    specs = worker_specs(config, (0, 1), (local_address("0.0.0.0:50051"),), fleet_devices(config, ()))
    configs: list[DecodeConfig] = [parsed(DecodeConfig, *specs[1].arguments)]
    assert configs[0].listen == "127.0.0.1:0"
    assert configs[0].router == ("127.0.0.1:50051",)


@pytest.mark.parametrize(("given", "of_workers"), [("0.0.0.0:9464", "127.0.0.1:0"), ("none", None)])
def test_the_admin_address_is_the_routers_and_none_switches_all_admin_ports_off(
    given: str, of_workers: str | None
) -> None:
    config = serve("--admin-listen", given, "--decode", "2")
    prefill, *decodes = worker_specs(config, (0, 1), ROUTERS, fleet_devices(config, ()))
    router: RouterConfig = parsed(RouterConfig, *router_spec(config, (0,), "127.0.0.1:7").arguments)
    configs = [parsed(PrefillConfig, *prefill.arguments), *(parsed(DecodeConfig, *each.arguments) for each in decodes)]
    assert router.admin_listen == (None if given == "none" else given)
    assert [each.admin_listen for each in configs] == [of_workers] * 3


def test_a_router_is_restarted_on_the_port_it_had() -> None:
    spec = router_spec(serve("--listen", "127.0.0.1:0"), (0, 1), "127.0.0.1:4711")
    config: RouterConfig = parsed(RouterConfig, *spec.arguments)
    assert config.listen == "127.0.0.1:4711"


@pytest.mark.parametrize(
    ("given", "second"),
    [
        ("127.0.0.1:9000", "127.0.0.1:9001"),
        ("127.0.0.1:9090", "127.0.0.1:0"),
        ("127.0.0.1:0", "127.0.0.1:0"),
        ("none", None),
    ],
)
def test_several_routers_share_the_port_and_have_an_address_and_an_admin_port_of_their_own(
    given: str, second: str | None
) -> None:
    config = serve("--router-processes", "2", "--admin-listen", given)
    spec = router_spec(config, (0, 1), "127.0.0.1:4712", "127.0.0.1:4711", index=1)
    router: RouterConfig = parsed(RouterConfig, *spec.arguments)
    assert (router.listen, router.shared_listen, router.admin_listen) == ("127.0.0.1:4712", "127.0.0.1:4711", second)


async def test_a_port_that_routers_are_to_share_is_refused_where_another_server_has_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = serve("--router-processes", "2", "--threads", "1", "--listen", f"127.0.0.1:{taken.getsockname()[1]}")
        server = _Server(config, fleet_devices(config, ()), asyncio.TaskGroup())
        with pytest.raises(ConfigError, match="--listen"):
            await server._start_routers()
        server._held_ports.close()


def test_workers_register_with_every_router() -> None:
    specs = worker_specs(serve(), (0, 1), ("127.0.0.1:7", "127.0.0.1:8"), fleet_devices(serve(), ()))
    workers: list[DecodeConfig] = [parsed(DecodeConfig, *spec.arguments) for spec in specs]
    assert {worker.router for worker in workers} == {("127.0.0.1:7", "127.0.0.1:8")}


def test_children_get_more_time_to_stop_than_their_own_drain_takes() -> None:
    config = serve("--drain-grace-seconds", "7", "--prefill", "1")
    specs = worker_specs(config, (0, 1), ROUTERS, fleet_devices(config, ()))
    assert all(spec.stop_grace_s > 7 for spec in [*specs, router_spec(config, (0,), "127.0.0.1:7")])


def test_workers_on_a_gpu_are_not_pinned() -> None:
    specs = worker_specs(serve(), (0, 1), ROUTERS, fleet_devices(serve(), ("GPU-a",)))
    assert all(spec.cores == (0, 1) and spec.nice == 0 for spec in specs)


def test_a_worker_on_a_gpu_sees_its_own_first_and_knows_with_whom_it_shares_memory() -> None:
    config, gpus = serve("--prefill", "1", "--decode", "3"), ("GPU-a", "GPU-b")
    specs = worker_specs(config, (0, 1), ROUTERS, fleet_devices(config, gpus))
    assert [spec.gpus[0] for spec in specs] == ["GPU-a", "GPU-a", "GPU-b", "GPU-b"]
    assert all(set(spec.gpus) == set(gpus) for spec in specs)
    last: DecodeConfig = parsed(DecodeConfig, *specs[-1].arguments)
    assert (last.device, last.device_workers, last.host_workers) == ("cuda:0", 2, 4)


def test_one_gpu_gets_one_elastic_worker_that_has_it_alone() -> None:
    (spec,) = worker_specs(serve(), (0, 1), ROUTERS, fleet_devices(serve(), ("GPU-a",)))
    worker: DecodeConfig = parsed(DecodeConfig, *spec.arguments)
    assert (worker.elastic, worker.device, worker.device_workers, worker.kv_memory) == (True, "cuda:0", 1, None)


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:1"])
def test_without_gpus_workers_are_told_the_device_of_serve(device: str) -> None:
    plan = fleet_devices(serve("--device", device, "--decode", "2"), ())
    assert [share.device for share in (*plan.prefill, *plan.decode)] == [device] * 3
    assert not plan.on_gpus


def test_one_device_for_all_is_shared_by_all() -> None:
    plan = fleet_devices(serve("--device", "cuda:1", "--decode", "1"), ("GPU-a", "GPU-b"))
    assert [(share.gpus[0], share.num_workers) for share in (*plan.prefill, *plan.decode)] == [("GPU-b", 2)] * 2
    with pytest.raises(ConfigError, match=r"--device: cuda:2 is not here; GPUs are GPU-a, GPU-b"):
        fleet_devices(serve("--device", "cuda:2"), ("GPU-a", "GPU-b"))


def test_no_gpu_is_used_where_the_cpu_is_asked_for() -> None:
    assert not fleet_devices(serve("--device", "cpu"), ("GPU-a",)).on_gpus


def test_a_list_of_devices_makes_as_many_elastic_workers() -> None:
    plan = fleet_devices(serve("--device", "cuda:1,cpu"), ("GPU-a", "GPU-b"))
    assert [(share.device, share.gpus[:1]) for share in plan.decode] == [("cuda:0", ("GPU-b",)), ("cpu", ())]


def test_claims_of_all_workers_on_host_memory_must_fit_together() -> None:
    config = serve("--prefill", "1", "--decode", "2", "--kv-memory", "1000", "--host-cache-memory", "2000")
    on_cpu, on_gpu = fleet_devices(config, ()), fleet_devices(config, ("GPU-a",))
    check_host_memory(config, on_cpu, 9000)
    check_host_memory(config, on_cpu, None)
    with pytest.raises(ConfigError, match=r"--host-cache-memory: 3 workers claim 9000 bytes .*8999"):
        check_host_memory(config, on_cpu, 8999)
    check_host_memory(config, on_gpu, 6000)  # the pools are not in host memory
    check_host_memory(serve("--no-prefix-cache", "--host-cache-memory", "2000"), fleet_devices(serve(), ()), 0)


def test_shares_of_host_memory_must_fit_together() -> None:
    for share, fits in (("50%", True), ("60%", False)):
        config = serve("--workers", "2", "--kv-memory", share)
        with nullcontext() if fits else pytest.raises(ConfigError, match="--kv-memory: 2 workers claim 10800 bytes"):
            check_host_memory(config, fleet_devices(config, ()), 9000)


@pytest.mark.parametrize("local", ["0", "128"])
def test_no_prefill_worker_without_unlimited_local_prefill_is_refused(local: str) -> None:
    with pytest.raises(ConfigError, match="--prefill"):
        check_fleet(serve("--prefill", "0", "--local-prefill-tokens", local))


def test_a_colocated_server_is_fine() -> None:
    config = serve("--prefill", "0", "--local-prefill-tokens", "unlimited")
    check_fleet(config)
    (only,) = worker_specs(config, (0, 1), ROUTERS, fleet_devices(config, ()))
    assert (only.name, only.cores) == ("decode-0", (0, 1))


def test_by_default_two_elastic_workers_share_the_cores() -> None:
    config = serve()
    check_fleet(config)
    specs = worker_specs(config, (0, 1), ROUTERS, fleet_devices(config, ()))
    assert [(spec.name, spec.module, spec.cores) for spec in specs] == [
        ("worker-0", "decode_worker", (0,)),
        ("worker-1", "decode_worker", (1,)),
    ]
    worker: DecodeConfig = parsed(DecodeConfig, *specs[0].arguments)
    assert (worker.elastic, worker.threads) == (True, 1)


def test_by_default_each_gpu_has_one_elastic_worker() -> None:
    config, gpus = serve(), ("GPU-a", "GPU-b")
    specs = worker_specs(config, (0, 1), ROUTERS, fleet_devices(config, gpus))
    assert [(spec.name, spec.gpus[0]) for spec in specs] == [("worker-0", "GPU-a"), ("worker-1", "GPU-b")]
    assert len(fleet_devices(serve("--device", "cpu"), gpus).decode) == 2
    assert len(fleet_devices(serve("--workers", "4"), gpus).decode) == 4


@pytest.mark.parametrize("flag", ["--prefill", "--decode"])
def test_a_number_of_workers_of_one_role_makes_all_roles_static(flag: str) -> None:
    config = serve(flag, "2")
    check_fleet(config)
    specs = worker_specs(config, range(4), ROUTERS, fleet_devices(config, ()))
    assert sorted(spec.name.split("-")[0] for spec in specs) == sorted(["prefill", "decode", flag.strip("-")])
    assert not any(parsed(DecodeConfig, *spec.arguments).elastic for spec in specs if spec.module == "decode_worker")


@pytest.mark.parametrize("flag", ["--prefill", "--decode"])
def test_elastic_workers_beside_static_ones_are_refused(flag: str) -> None:
    with pytest.raises(ConfigError, match="--workers"):
        check_fleet(serve(flag, "1", "--workers", "2"))
