from __future__ import annotations

import argparse
import socket

import pytest

from cli.router import claimed, process_configs
from shell.config import RouterConfig, add_arguments, argv_of, load
from tandem.errors import ConfigError


def test_each_process_shares_the_port_and_has_one_of_its_own_and_an_admin_port() -> None:
    listen = claimed("127.0.0.1:0", 3)
    first = int(listen.rpartition(":")[2])

    configs = process_configs(RouterConfig(listen=listen, admin_listen="127.0.0.1:9000"), 3)

    assert [each.listen for each in configs] == [listen] * 3
    assert [each.process for each in configs] == [0, 1, 2]
    assert {each.process_ports for each in configs} == {(first + 1, first + 2, first + 3)}
    assert [each.admin_listen for each in configs] == [f"127.0.0.1:{port}" for port in (9000, 9001, 9002)]


@pytest.mark.parametrize("admin_listen", ["127.0.0.1:0", None])
def test_an_admin_port_that_is_any_or_none_is_so_for_all(admin_listen: str | None) -> None:
    configs = process_configs(RouterConfig(listen="127.0.0.1:0", admin_listen=admin_listen), 2)
    assert [each.admin_listen for each in configs] == [admin_listen] * 2


def test_a_router_of_one_process_is_left_as_it_is() -> None:
    config = RouterConfig()
    assert process_configs(config, 1) == [config]
    assert config.process_ports == ()


def test_a_process_reads_back_what_it_is_given() -> None:
    (_, second) = process_configs(RouterConfig(listen="127.0.0.1:0"), 2)
    parser = argparse.ArgumentParser()
    add_arguments(parser, RouterConfig)
    assert load(RouterConfig, parser.parse_args(argv_of(second)), {}) == second


def test_a_port_of_a_process_that_is_taken_is_told_before_any_starts() -> None:
    listen = claimed("127.0.0.1:0", 2)
    with socket.create_server(("127.0.0.1", int(listen.rpartition(":")[2]) + 2)), pytest.raises(ConfigError):
        claimed(listen, 2)
