"""Commands that pages show are ones that `tandem` takes, and options that they name are there."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

import cli.main
from shell.config import ClientConfig, DecodeConfig, ElasticConfig, PrefillConfig, RouterConfig, ServeConfig
from tandem.options import options_of

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
CONFIGS = (RouterConfig, PrefillConfig, DecodeConfig, ElasticConfig, ServeConfig, ClientConfig)
OPTIONS = {name for config in CONFIGS for each in options_of(config) for name in (each.flag, f"--no-{each.name}")}


def commands(page: Path) -> Iterator[list[str]]:
    """Every `tandem …` that stands alone in a block of the page, without what a shell would take away."""
    for block in re.findall(r"^ *```\w*\n(.*?)^ *```$", page.read_text(), re.DOTALL | re.MULTILINE):
        for line in re.sub(r"\\\n\s*", " ", block).splitlines():
            if re.match(r"\s*(?:[A-Z_]+=\S+ )*tandem (?!\w+:|int\d)", line):
                words = shlex.split(line.replace("$SECURITY", ""), comments=True)
                yield words[words.index("tandem") + 1 :]


def shown() -> list[tuple[str, list[str]]]:
    return [(page.name, command) for page in PAGES if page.name != "performance.md" for command in commands(page)]


class ParsedError(Exception):
    """The command line was read; nothing is to run."""


@pytest.mark.parametrize(("page", "command"), shown(), ids=lambda value: value if isinstance(value, str) else value[0])
def test_a_command_that_a_page_shows_is_read(page: str, command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    parse = argparse.ArgumentParser.parse_known_args

    def parse_only(self: argparse.ArgumentParser, *args: object, **options: object) -> object:
        result = parse(self, *args, **options)  # type: ignore[call-overload]
        if self.prog == "tandem":
            raise ParsedError(result[1])
        return result

    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", parse_only)
    monkeypatch.setattr(cli.main, "hold_standard_streams", lambda: None)
    with pytest.raises(ParsedError) as caught:
        cli.main.main([word for word in command if word not in {"&", "|"}])
    assert caught.value.args == ([],), page


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_a_machine_without_a_gpu_gets_the_torch_that_is_pinned_and_before_the_rest(page: str) -> None:
    text = (ROOT / page).read_text()
    pinned = re.search(r"^torch==\S+$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    line = f"pip install {pinned[0]} --index-url https://download.pytorch.org/whl/cpu\n"
    assert 0 < text.find(line) < text.find("pip install -c constraints.txt")


def test_the_page_for_those_who_come_from_vllm_names_options_that_are_there() -> None:
    table = (ROOT / "docs/comparison.md").read_text().split("| vLLM | Tandem | differs in |")[1].split("\n\n")[0]
    cells = [row.split("|")[2] for row in table.splitlines()[2:]]
    named = [name for cell in cells for name in re.findall(r"`(--[a-z-]+)", cell)]
    assert len(named) > 30
    assert [name for name in named if name not in OPTIONS] == []
