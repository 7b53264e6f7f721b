"""Frameworks over the HTTP face, each unmodified, in an environment beside this one: `make frameworks`."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.support.cluster import serve
from tests.http_address import http_address

PYTHON = Path(__file__).parents[2] / ".venv" / "frameworks" / "bin" / "python"
BEGIN = """
import sys
from typing import Literal
from pydantic import BaseModel, ConfigDict
BASE = f"http://{sys.argv[1]}/v1"

class Place(BaseModel):
    "A city."
    model_config = ConfigDict(extra="forbid")
    city: Literal["Paris", "Rome"]
"""
SNIPPETS = {
    "langchain": """
from langchain_openai import ChatOpenAI
chat = ChatOpenAI(base_url=BASE, api_key="none", model="demo", temperature=0, max_tokens=200, max_retries=0)
whole = chat.invoke("Tell me a story.")
assert whole.content and whole.usage_metadata["output_tokens"], whole
assert "".join(chunk.text for chunk in chat.stream("Tell me a story.")) == whole.text
assert chat.with_structured_output(Place, method="json_schema").invoke("Where?").city in {"Paris", "Rome"}
assert chat.with_structured_output(Place, method="function_calling").invoke("Where?").city in {"Paris", "Rome"}
called = chat.bind_tools([Place], tool_choice="required", parallel_tool_calls=False).invoke("Where?")
assert called.tool_calls[0]["name"] == "Place", called
responses = ChatOpenAI(base_url=BASE, api_key="none", model="demo", use_responses_api=True, max_retries=0)
assert responses.invoke("Hello", max_output_tokens=20).text
""",
    "litellm": """
import litellm
litellm.num_retries = 0
for model in ("openai/demo", "hosted_vllm/demo"):
    asked = dict(model=model, api_base=BASE, api_key="none", temperature=0, max_tokens=20,
                 messages=[{"role": "user", "content": "Tell me a story."}])
    whole = litellm.completion(**asked)
    pieces = [chunk.choices[0].delta.content or "" for chunk in litellm.completion(stream=True, **asked)]
    assert "".join(pieces) == whole.choices[0].message.content, pieces
    assert whole.usage.completion_tokens == 20, whole
said = litellm.completion(model="anthropic/demo", api_base=BASE.removesuffix("/v1"), api_key="none", max_tokens=20,
                          messages=[{"role": "user", "content": "Hello"}])
assert said.choices[0].message.content
""",
    "instructor": """
import instructor
from openai import OpenAI
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(OpenAI(base_url=BASE, api_key="none", max_retries=0), mode=mode)
    found = client.chat.completions.create(
        model="demo", response_model=Place, max_retries=1, max_tokens=200,
        messages=[{"role": "user", "content": "Where?"}],
    )
    assert found.city in {"Paris", "Rome"}, (mode, found)
""",
}


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with serve("demo", "--http", "127.0.0.1:0") as cluster:
        yield http_address(cluster)


@pytest.mark.frameworks
@pytest.mark.parametrize("name", SNIPPETS)
def test_a_framework_gets_what_it_asks_for(address: str, name: str) -> None:
    done = subprocess.run(
        [str(PYTHON), "-c", BEGIN + SNIPPETS[name], address], capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr
