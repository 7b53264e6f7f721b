"""When load on a server that was started for it counts as having gone well."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest

from bench import served
from kernels.triton import COMPILED


@pytest.mark.parametrize(
    ("lines", "succeeded", "code"),
    [
        (["level=info event=serving\n"], 96, 0),
        (["level=info event=serving\n"], 95, 1),
        ([f'level=warning event="{COMPILED}" kernel=k\n'], 96, 1),
    ],
    ids=["well", "a request failed", "a kernel was compiled"],
)
def test_it_goes_well_when_all_succeed_and_nothing_is_compiled_meanwhile(
    lines: list[str],
    succeeded: int,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    @contextmanager
    def serve(*_: str) -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(target="there", log=lines)

    report = SimpleNamespace(num_succeeded=succeeded, as_json=lambda: '{"requests": [], "rates_per_s": 1}')
    monkeypatch.setattr(served, "serve", serve)
    monkeypatch.setattr(served, "Client", lambda _: nullcontext(SimpleNamespace(wait_ready=lambda _: None)))
    monkeypatch.setattr(served, "run", lambda *_: report)

    assert served.main([]) == code
    said = capsys.readouterr()
    assert json.loads(said.out) == {"rates_per_s": 1}
    assert said.err == "".join(line for line in lines if COMPILED in line)
