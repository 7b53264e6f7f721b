"""Pages that people rely on say what the code says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cli.main import main
from tandem.errors import Reason
from tandem.limits import Limits
from tandem.v1 import inference_pb2
from tests.kernels.oracle import TOLERANCES

ROOT = Path(__file__).parents[2]


def test_every_error_reason_is_explained() -> None:
    page = (ROOT / "docs" / "protocol.md").read_text()
    explained = set(re.findall(r"^\| `[A-Z_]+` \| `([A-Z_]+)` \|", page, flags=re.MULTILINE))

    assert explained == {reason.value for reason in Reason}


def test_every_option_in_readme_exists(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["serve", "--help"])
    known = set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out))
    table = (ROOT / "README.md").read_text().split("| option |")[1].split("\n\n")[0]
    named = set(re.findall(r"`(--[a-z-]+)`", table))

    assert named
    assert named <= known


def test_the_index_has_a_line_for_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    known = set(re.findall(r"^    ([a-z]+)  ", capsys.readouterr().out, flags=re.MULTILINE))
    table = (ROOT / "docs/index.md").read_text().split("| command | does |")[1].split("\n\n")[0]

    assert set(re.findall(r"`tandem ([a-z]+)", table)) == known


def test_the_table_of_sampling_parameters_has_every_field_and_the_caps_as_they_are() -> None:
    table = (ROOT / "docs" / "protocol.md").read_text().split("| field |")[1].split("\n\n")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \|(.*)$", table, flags=re.MULTILINE))
    caps = re.findall(r"(\d+)(?: [A-Za-z]+)* \(`--([a-z-]+)`\)", table)

    assert set(rows) == set(inference_pb2.SamplingParams.DESCRIPTOR.fields_by_name)
    assert len(caps) == 3
    for value, option in caps:
        default = getattr(Limits(), option.replace("-", "_"))
        assert int(value) in (default, default // 1024), option
    limits = Limits()
    assert f"1 to {limits.max_n} |" in rows["n"]
    assert f"2 to {limits.max_beam_width};" in rows["beam_width"]
    assert f"{limits.max_stop_strings} texts of {limits.max_stop_bytes} bytes" in rows["stop"]
    assert f"{limits.max_stop_token_ids} ids" in rows["stop_token_ids"]
    assert f"{limits.max_logit_bias} ids" in rows["logit_bias"]


def test_every_test_that_the_fault_matrix_names_exists() -> None:
    page = (ROOT / "docs" / "reliability.md").read_text()
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", page)

    assert len(named) > 30
    for path, name in named:
        assert f"def {name}(" in (ROOT / "tests" / path).read_text(), f"{path}::{name}"


def test_every_row_of_the_fault_matrix_names_a_test() -> None:
    matrix = (ROOT / "docs" / "reliability.md").read_text().split("| fault | stage |")[1].split("\n\n")[0]

    for row in matrix.splitlines()[2:]:
        assert ".py::test_" in row, row


def test_the_kernels_page_states_the_bounds_that_the_tests_hold_them_to() -> None:
    names, _, bounds = (
        (ROOT / "docs" / "kernels.md").read_text().split("| float32 |")[1].split("\n\n")[0].split("\n")[:3]
    )
    stated = dict(zip(("float32", *names.strip(" |").split(" | ")), bounds.strip(" |").split(" | "), strict=True))

    assert stated.keys() == {"float32", "bfloat16", "float16"}
    for dtype, bound in TOLERANCES.items():
        if (name := str(dtype).removeprefix("torch.")) in stated:
            assert float(stated[name]) == bound
