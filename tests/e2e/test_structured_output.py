"""Constrained output, end to end: always valid, the same wherever it is drawn, and no harm to others."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import pytest

from bench.support.cluster import Cluster, becomes_idle, eventually, serve
from tandem.client import Client
from tandem.client.results import Choice
from tandem.errors import InvalidRequest
from tandem.types import FinishReason
from tests.at_rest import nothing_runs

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", None]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
CASES: dict[str, dict[str, Any]] = {
    "json_schema": {"json_schema": json.dumps(SCHEMA)},
    "regex": {"regex": "[a-z]{2,7}( [0-9é]{2,4})*!"},
    "grammar": {"grammar": 'start: list\nlist: "[" (item ("," item)*)? "]"\nitem: /[1-9][0-9]{0,2}/ | list'},
    "choice": {"choice": ["yes", "no", "no, never", "(?)"]},
}
PROMPT = "Once upon a time"


@pytest.fixture(scope="module", params=["disaggregated", "colocated"])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    way = ("--local-prefill-tokens", "unlimited") if request.param == "colocated" else ("--transport", "shm")
    with serve("demo", "--prefill", "1", "--decode", "1", "--patience-seconds", "60", *way) as cluster:
        yield cluster
        with Client(cluster.target) as client:
            assert becomes_idle(client, 15), client.status()


@pytest.fixture
def client(cluster: Cluster) -> Iterator[Client]:
    with Client(cluster.target) as client:
        client.wait_ready(30)
        yield client
        assert nothing_runs(client, 15), client.status()


def is_list(text: str) -> bool:
    return re.fullmatch(r"[\[\],0-9]+", text) is not None and isinstance(json.loads(text), list)


def check(case: str, choice: Choice) -> None:
    """Whole texts match; one that max_tokens cut may be anything."""
    if choice.finish_reason is FinishReason.LENGTH:
        return
    match case:
        case "json_schema":
            jsonschema.validate(json.loads(choice.text), SCHEMA)
        case "regex":
            assert re.fullmatch(CASES[case]["regex"], choice.text), choice.text
        case "grammar":
            assert is_list(choice.text), choice.text
        case _:
            assert choice.text in CASES[case]["choice"]


@pytest.mark.parametrize("case", CASES)
def test_every_text_is_valid_and_is_that_of_the_single_request(client: Client, case: str) -> None:
    """At a high temperature, so that next to nothing would be valid by itself."""
    options = {**CASES[case], "max_tokens": 120, "temperature": 3.0}
    together = client.complete(PROMPT, n=8, seed=70, **options).choices

    with ThreadPoolExecutor(8) as pool:
        singles = list(pool.map(lambda i: client.complete(PROMPT, seed=70 + i, **options).choices[0], range(8)))

    assert [each.token_ids for each in together] == [each.token_ids for each in singles]
    assert sum(each.finish_reason is FinishReason.STOP for each in together) >= 2
    for choice in together:
        check(case, choice)


def test_a_constraint_that_the_text_meets_anyway_changes_nothing(client: Client) -> None:
    options: dict[str, Any] = {"max_tokens": 48, "temperature": 0.0, "logprobs": 2}
    free = client.complete(PROMPT, **options).choices[0]
    pattern = "".join(f"[{re.escape(char)}a-z .]" for char in free.text)

    assert client.complete(PROMPT, regex=pattern, **options).choices[0] == free


def test_the_grammar_has_the_last_word_on_where_a_text_ends(client: Client) -> None:
    (ended,) = client.complete(PROMPT, regex="ab", max_tokens=9, min_tokens=8, ignore_eos=True).choices
    (cut,) = client.complete(PROMPT, regex="[ab]{20}", max_tokens=9, min_tokens=8, ignore_eos=True).choices

    assert (ended.text, ended.finish_reason) == ("ab", FinishReason.STOP)
    assert (len(cut.token_ids), cut.finish_reason) == (9, FinishReason.LENGTH)
    assert re.fullmatch("[ab]{9,}", cut.text)


def test_what_cannot_be_compiled_in_time_harms_nobody(client: Client) -> None:
    endless = "\n".join(f"T{i}: T{i + 1} T{i + 1}" for i in range(2000)) + '\nT2000: "a"\nstart: T0'
    with ThreadPoolExecutor(4) as pool:
        hostile = pool.submit(client.complete, PROMPT, grammar=endless)
        for seed in range(3):
            assert client.complete(PROMPT, max_tokens=8, seed=seed).choices[0].token_ids
        error = hostile.exception(60)

    assert isinstance(error, InvalidRequest)
    assert error.field == "sampling.grammar"


def test_one_that_becomes_too_complex_on_its_way_fails_by_itself(client: Client) -> None:
    with pytest.raises(InvalidRequest) as failed:
        client.complete(PROMPT, grammar='start: x{1000}\nx: y{1000}\ny: "a"{1000}', max_tokens=200)

    assert failed.value.field == "sampling.grammar"
    assert client.complete(PROMPT, choice=["yes"]).choices[0].text == "yes"
    assert eventually(lambda: client.status().active_requests == 0)
