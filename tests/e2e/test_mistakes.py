"""Every mistake of `tests.mistakes`: a line that says what is wrong and what to do, and an exit code."""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.support.cluster import run_command
from cli.main import main
from models.files.checkpoint import resolve_model
from tests.fake_hub import fake_hub
from tests.finished_command import finished
from tests.mistake import Mistake
from tests.mistakes import ANY, MISTAKES, PAGE, busy_address, page
from tests.pki import LOOPBACK, OTHER_TOKEN, TOKEN, Pki

QUICK = ("--patience-seconds", "0")


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """What stands in braces: two routers without workers, one of them with TLS and a token, and files."""
    folder = tmp_path_factory.mktemp("places")
    base = Path(shutil.copytree(resolve_model("demo"), folder / "base"))
    (base / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((base / "tokenizer_config.json").read_text())
    (base / "tokenizer_config.json").write_text(
        json.dumps({name: value for name, value in settings.items() if name != "chat_template"})
    )
    pki, other = Pki(folder), Pki(folder, "other")
    shown = pki.issue(LOOPBACK)
    listen = ("router", "--model", str(base), "--listen", "127.0.0.1:0", *QUICK)
    security = ("--tls-cert", shown.cert, "--tls-key", shown.key, "--tls-ca", pki.ca, "--token-file", pki.tokens(TOKEN))
    pickled = folder / "pickled"
    pickled.mkdir()
    shutil.copy(base / "config.json", pickled)
    refused = {"org/gated": (403, "GatedRepo")}
    with (
        fake_hub({"org/model": base, "org/pickled": pickled}, refused) as hub,
        run_command(*listen) as router,
        run_command(*listen, *security) as secure,
        busy_address() as busy,
    ):
        yield {
            "hub": hub.url,
            "router": router.target,
            "secure": secure.target,
            "busy": busy,
            "ca": pki.ca,
            "other_ca": other.ca,
            "token": other.tokens(OTHER_TOKEN),
        }


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda each: each.what)
def test_the_message_says_what_is_wrong_and_what_to_do(
    mistake: Mistake,
    places: dict[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = mistake.spoil(Path(shutil.copytree(resolve_model("demo"), tmp_path / "model")))
    known = {**places, "model": model}
    argv = [part.format_map(known) for part in mistake.argv]
    environment = {name: value.format_map(known) for name, value in mistake.environment.items()}
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))

    if mistake.own_process or environment:
        done = finished(*argv, **environment)
        code, told = done.returncode, done.stderr
    else:
        code, told = _run_here(argv, capsys)

    wanted = mistake.message if mistake.message.startswith("tandem ") else f"tandem: {mistake.message}"
    assert re.fullmatch(re.escape(wanted).replace(re.escape(ANY), ".*"), told.splitlines()[-1]), told
    assert code != 0 or argv[0] == "chat"  # which goes on
    assert "Traceback" not in told


def _run_here(argv: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    capsys.readouterr()
    try:
        code = main(argv)
    except SystemExit as ended:
        code = int(ended.code or 0)
    return code, capsys.readouterr().err


def test_there_are_thirty_at_least_and_none_twice() -> None:
    assert len({each.what for each in MISTAKES}) == len(MISTAKES) >= 30


def test_the_page_is_as_the_table() -> None:
    assert PAGE.read_text() == page(), "run python -m tests.mistakes"
