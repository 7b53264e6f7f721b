"""The page on the API says what the protos say, of every field that the stubs have."""

from __future__ import annotations

import re
import sys

import pytest

from tandem.foreign import kserve_pb2, vllm_engine_pb2
from tandem.v1 import cluster_pb2, inference_pb2
from tests.scripts import ROOT, load_script

PAGE = (ROOT / "docs" / "api.md").read_text()
SECTIONS = dict(re.findall(r"^### (\S+)\n(.*?)(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL))


def test_the_page_is_that_of_the_protos(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["api_page.py"])
    assert load_script(".ci/checks/api_page.py").main() == 0


@pytest.mark.parametrize("stubs", [inference_pb2, cluster_pb2, kserve_pb2, vllm_engine_pb2])
def test_every_field_and_method_has_a_row_that_says_something(stubs: object) -> None:
    file = stubs.DESCRIPTOR  # type: ignore[attr-defined]
    for message in file.message_types_by_name.values():
        rows = dict(re.findall(r"^\| `(\w+)` \| \d+ \| .* \| (.+) \|$", SECTIONS[message.full_name], re.MULTILINE))
        assert list(rows) == [field.name for field in message.fields], message.full_name
    for service in file.services_by_name.values():
        table = PAGE.split(f"## {service.full_name}\n")[1].split("\n### ")[0]
        assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == [method.name for method in service.methods]
