import argparse
from typing import Any

import pytest

from cli.serve import check_fleet, local_address, router_spec, worker_specs
from tandem.config import DecodeConfig, PrefillConfig, RouterConfig, ServeConfig, add_arguments, load
from tandem.errors import ConfigError


def parsed(cls: Any, *argv: str) -> Any:
    parser = argparse.ArgumentParser()
    add_arguments(parser, cls)
    return load(cls, parser.parse_args(argv), {})


def serve(*argv: str) -> ServeConfig:
    config: ServeConfig = parsed(ServeConfig, *argv)
    return config


def test_the_arguments_of_a_child_give_it_the_options_of_serve() -> None:
    config = serve("--model", "m", "--block-size", "32", "--prefill", "1", "--decode", "2", "--no-overlap")
    prefill, *decodes = worker_specs(config, (0, 1, 2, 3), "127.0.0.1:7", on_gpu=False)
    first: PrefillConfig = parsed(PrefillConfig, *prefill.arguments)
    assert (first.model, first.block_size, first.overlap) == ("m", 32, False)
    assert (first.router, first.worker_id, first.threads) == (("127.0.0.1:7",), "prefill-0", 2)
    second: DecodeConfig = parsed(DecodeConfig, *decodes[1].arguments)
    assert (second.worker_id, second.block_size, second.threads) == ("decode-1", 32, 1)


def test_workers_listen_on_loopback_whatever_the_router_does() -> None:
    config = serve("--listen", "0.0.0.0:50051")
    specs = worker_specs(config, (0, 1), local_address("0.0.0.0:50051"), on_gpu=False)
    configs: list[DecodeConfig] = [parsed(DecodeConfig, *specs[1].arguments)]
    assert configs[0].listen == "127.0.0.1:0"
    assert configs[0].router == ("127.0.0.1:50051",)


@pytest.mark.parametrize(("given", "of_workers"), [("0.0.0.0:9464", "127.0.0.1:0"), ("none", None)])
def test_the_admin_address_is_the_routers_and_none_switches_all_admin_ports_off(
    given: str, of_workers: str | None
) -> None:
    config = serve("--admin-listen", given, "--decode", "2")
    prefill, *decodes = worker_specs(config, (0, 1), "127.0.0.1:7", on_gpu=False)
    router: RouterConfig = parsed(RouterConfig, *router_spec(config, (0,), "127.0.0.1:7").arguments)
    configs = [parsed(PrefillConfig, *prefill.arguments), *(parsed(DecodeConfig, *each.arguments) for each in decodes)]
    assert router.admin_listen == (None if given == "none" else given)
    assert [each.admin_listen for each in configs] == [of_workers] * 3


def test_a_router_is_restarted_on_the_port_it_had() -> None:
    spec = router_spec(serve("--listen", "127.0.0.1:0"), (0, 1), "127.0.0.1:4711")
    config: RouterConfig = parsed(RouterConfig, *spec.arguments)
    assert config.listen == "127.0.0.1:4711"


def test_children_get_more_time_to_stop_than_their_own_drain_takes() -> None:
    config = serve("--drain-grace-seconds", "7")
    specs = worker_specs(config, (0, 1), "127.0.0.1:7", on_gpu=False)
    assert all(spec.stop_grace_s > 7 for spec in [*specs, router_spec(config, (0,), "127.0.0.1:7")])


def test_workers_on_a_gpu_are_not_pinned() -> None:
    specs = worker_specs(serve(), (0, 1), "127.0.0.1:7", on_gpu=True)
    assert all(spec.cores == (0, 1) and spec.nice == 0 for spec in specs)


@pytest.mark.parametrize("local", ["0", "128"])
def test_no_prefill_worker_without_unlimited_local_prefill_is_refused(local: str) -> None:
    with pytest.raises(ConfigError, match="--prefill"):
        check_fleet(serve("--prefill", "0", "--local-prefill-tokens", local))


def test_a_colocated_server_is_fine() -> None:
    config = serve("--prefill", "0", "--local-prefill-tokens", "unlimited")
    check_fleet(config)
    (only,) = worker_specs(config, (0, 1), "127.0.0.1:7", on_gpu=False)
    assert (only.name, only.cores) == ("decode-0", (0, 1))
