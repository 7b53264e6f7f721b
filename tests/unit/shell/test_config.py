from __future__ import annotations

import argparse
import re
from dataclasses import replace
from typing import Any

import pytest

from shell.config import (
    ClientConfig,
    DecodeConfig,
    PrefillConfig,
    RouterConfig,
    ServeConfig,
    add_arguments,
    argv_of,
    load,
)
from shell.removed_options import REMOVED
from tandem.errors import ConfigError
from tandem.option_values import Share, SizedFolder
from tandem.options import options_of

COMMANDS: list[type[Any]] = [RouterConfig, PrefillConfig, DecodeConfig, ServeConfig, ClientConfig]


def read(cls: type[Any], *argv: str, **environ: str) -> Any:
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    add_arguments(parser, cls)
    return load(cls, parser.parse_args(argv), environ)


def test_argv_wins_over_environment_and_environment_over_default() -> None:
    assert read(DecodeConfig).block_size == 16
    assert read(DecodeConfig, TANDEM_BLOCK_SIZE="32").block_size == 32
    assert read(DecodeConfig, "--block-size", "64", TANDEM_BLOCK_SIZE="32").block_size == 64


@pytest.mark.parametrize(
    ("cls", "argv", "field", "value"),
    [
        (DecodeConfig, ["--kv-memory", "2GiB"], "kv_memory", 2 * 1024**3),
        (DecodeConfig, ["--kv-memory", "1.5k"], "kv_memory", 1500),
        (DecodeConfig, ["--kv-memory", "512MB"], "kv_memory", 512_000_000),
        (DecodeConfig, ["--kv-memory", "4096"], "kv_memory", 4096),
        (DecodeConfig, ["--kv-memory", "90%"], "kv_memory", Share(90.0)),
        (DecodeConfig, ["--kv-blocks", "auto"], "kv_blocks", None),
        (DecodeConfig, ["--local-prefill-tokens", "unlimited"], "local_prefill_tokens", None),
        (DecodeConfig, ["--local-prefill-tokens", "128"], "local_prefill_tokens", 128),
        (DecodeConfig, ["--router", "a:1", "--router", "b:2,[::1]:3"], "router", ("a:1", "b:2", "[::1]:3")),
        (PrefillConfig, ["--no-prefix-cache"], "prefix_cache", False),
        (PrefillConfig, ["--disk-cache", "/mnt/a=b=1KiB"], "disk_cache", SizedFolder("/mnt/a=b", 1024)),
        (PrefillConfig, ["--device", "cuda:1"], "device", "cuda:1"),
        (RouterConfig, ["--listen", "0.0.0.0:0"], "listen", "0.0.0.0:0"),
        (RouterConfig, ["--patience-seconds", "0.5"], "patience_s", 0.5),
    ],
)
def test_a_value_is_read_from_argv(cls: type[Any], argv: list[str], field: str, value: object) -> None:
    assert getattr(read(cls, *argv), field) == value


@pytest.mark.parametrize(
    ("variable", "text", "field", "value"),
    [
        ("TANDEM_KV_MEMORY", "1MiB", "kv_memory", 1024**2),
        ("TANDEM_ROUTER", "a:1,b:2", "router", ("a:1", "b:2")),
        ("TANDEM_PREFIX_CACHE", "false", "prefix_cache", False),
        ("TANDEM_KV_EVENTS", "tcp://*:5557,ipc:///run/replay", "kv_events", ("tcp://*:5557", "ipc:///run/replay")),
    ],
)
def test_a_value_is_read_from_the_environment(variable: str, text: str, field: str, value: object) -> None:
    assert getattr(read(PrefillConfig, **{variable: text}), field) == value


@pytest.mark.parametrize(
    ("flag", "text"),
    [
        ("--block-size", "0"),
        ("--block-size", "257"),
        ("--block-size", "sixteen"),
        ("--block-size", "1e9"),
        ("--kv-memory", "-1"),
        ("--kv-memory", "2 parsecs"),
        ("--kv-memory", "101%"),
        ("--kv-memory", "%"),
        ("--kv-blocks", "0"),
        ("--drain-grace-seconds", "nan"),
        ("--drain-grace-seconds", "-1"),
        ("--disk-cache", "/mnt"),
        ("--disk-cache", "/mnt=much"),
        ("--device", "tpu"),
        ("--dtype", "int8"),
        ("--transport", "pigeon"),
        ("--kv-events", "127.0.0.1:5557"),
        ("--kv-events", "udp://*:5557"),
        ("--kv-events-topic", "two words"),
        ("--router", "nohost"),
        ("--router", "host:99999"),
        ("--router", "host:0"),
        ("--listen", "127.0.0.1"),
        ("--worker-id", "a b"),
        ("--max-prompt-tokens", "-5"),
    ],
)
def test_a_bad_value_names_its_option(flag: str, text: str) -> None:
    with pytest.raises(ConfigError) as on_argv:
        read(DecodeConfig, f"{flag}={text}")
    variable = "TANDEM_" + flag[2:].replace("-", "_").upper()
    with pytest.raises(ConfigError) as in_environment:
        read(DecodeConfig, **{variable: text})

    assert on_argv.value.field == flag
    assert in_environment.value.field == variable


def test_an_unknown_key_in_the_environment_is_named() -> None:
    with pytest.raises(ConfigError, match="TANDEM_BLOCK_SIZES"):
        read(DecodeConfig, TANDEM_BLOCK_SIZES="16")


def test_what_kubernetes_sets_of_services_passes() -> None:
    links = {
        "TANDEM_ROUTER_SERVICE_HOST": "10.0.0.1",
        "TANDEM_ROUTER_SERVICE_PORT_GRPC": "50051",
        "TANDEM_ROUTER_PORT": "tcp://10.0.0.1:50051",
        "TANDEM_ROUTER_PORT_50051_TCP_ADDR": "10.0.0.1",
    }
    assert read(DecodeConfig, **links) == DecodeConfig()


def test_a_removed_option_is_refused_with_what_to_do_instead(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        read(ServeConfig, "--prefill-devices", "cuda:0")
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(f"error: --prefill-devices: removed: {REMOVED['prefill-devices']}")
    with pytest.raises(SystemExit):
        read(PrefillConfig, "--no-overlap")
    with pytest.raises(ConfigError, match=f"TANDEM_PREFILL_DEVICES: removed: {REMOVED['prefill-devices']}"):
        read(ServeConfig, TANDEM_PREFILL_DEVICES="cuda:0")


def test_what_replaces_a_removed_option_exists() -> None:
    names = {option.name for cls in COMMANDS for option in options_of(cls)}
    named = {flag for instead in REMOVED.values() for flag in re.findall(r"--([a-z-]+)", instead)}
    assert named <= names
    assert names.isdisjoint(REMOVED)


def test_options_of_children_are_read_but_not_shown() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser, DecodeConfig)
    assert "--kv-memory" in parser.format_help()
    assert "--device-workers" not in parser.format_help()
    assert read(DecodeConfig, "--device-workers", "3").device_workers == 3


def test_another_commands_key_and_other_programs_keys_are_fine() -> None:
    assert read(ClientConfig, TANDEM_MAX_QUEUED_REQUESTS="3", PATH="/bin") == ClientConfig()


@pytest.mark.parametrize("cls", COMMANDS)
def test_defaults_pass_their_own_bounds(cls: type[Any]) -> None:
    arguments = argv_of(cls())

    assert read(cls, *arguments) == cls()


@pytest.mark.parametrize("cls", COMMANDS)
def test_every_option_has_help_and_a_field_of_its_own(cls: type[Any]) -> None:
    for option in options_of(cls):
        assert option.help
    flags = argparse.ArgumentParser()
    add_arguments(flags, cls)
    assert "%(" not in flags.format_help()  # nothing that argparse should have filled in


def test_serve_shares_options_between_its_processes() -> None:
    config = read(ServeConfig, "--model", "m", "--chunk-tokens", "64", "--listen", "0.0.0.0:1234")

    assert (config.router.model, config.prefill_worker.model, config.decode_worker.model) == ("m", "m", "m")
    assert config.prefill_worker.chunk_tokens == config.decode_worker.chunk_tokens == 64
    assert config.router.listen == "0.0.0.0:1234"
    assert config.decode_worker.listen == "127.0.0.1:0", "the address of serve is its router's"


def test_the_address_of_serve_reaches_no_worker_by_the_environment_either() -> None:
    config = read(ServeConfig, TANDEM_LISTEN="0.0.0.0:1234", TANDEM_WORKER_ID="w")

    assert config.router.listen == "0.0.0.0:1234"
    assert config.decode_worker.listen == "127.0.0.1:0"
    assert config.decode_worker.worker_id is None


def test_the_argv_of_a_child_makes_the_same_config_whatever_the_environment_says() -> None:
    config = replace(
        read(ServeConfig, "--local-prefill-tokens", "unlimited", "--max-prompt-tokens", "9").decode_worker,
        router=("127.0.0.1:1",),
        worker_id="decode-0",
    )

    environ = {"TANDEM_LOCAL_PREFILL_TOKENS": "7", "TANDEM_LISTEN": "1.2.3.4:5", "TANDEM_THREADS": "3"}
    assert read(DecodeConfig, *argv_of(config), **environ) == config
