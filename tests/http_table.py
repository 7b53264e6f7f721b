"""What vLLM's server answers to each request, and what the HTTP face answers: a table."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

CHAT = [{"role": "user", "content": "Tell me a story."}]
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
Json = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """A request and what its answer must be."""

    path: str
    body: Json | None
    """None = a GET."""
    is_right: Callable[[Any], object] = lambda answer: True
    status: int = 200
    headers: Json = field(default_factory=dict)


def completion(is_right: Callable[[Any], object] = lambda _: True, status: int = 200, **fields: Any) -> Row:
    return Row(
        "/v1/completions", {"model": "demo", "prompt": "Once upon a time", "temperature": 0, **fields}, is_right, status
    )


def chat(is_right: Callable[[Any], object] = lambda _: True, status: int = 200, **fields: Any) -> Row:
    body = {"model": "demo", "messages": CHAT, "temperature": 0, "max_tokens": 8, **fields}
    return Row("/v1/chat/completions", body, is_right, status)


def refused(param: str) -> Callable[[Any], object]:
    return lambda answer: answer["error"]["param"] == param and answer["error"]["type"] == "invalid_request_error"


def text(answer: Any) -> str:
    return str(answer["choices"][0]["text"])


def said(answer: Any) -> str:
    return str(answer["choices"][0]["message"]["content"])


def nested(depth: int) -> Json:
    return {"properties": {"a": nested(depth - 1)}} if depth > 1 else {}


TABLE = {
    "a completion has 16 tokens if nothing is said": completion(lambda it: it["usage"]["completion_tokens"] == 16),
    "a prompt of token ids": completion(lambda it: it["usage"]["prompt_tokens"] == 3, prompt=[5, 6, 7]),
    "several prompts": completion(
        lambda it: [each["index"] for each in it["choices"]] == [0, 1, 2, 3] and it["usage"]["completion_tokens"] == 8,
        prompt=["Once", "There"],
        n=2,
        max_tokens=2,
    ),
    "prompts of token ids": completion(lambda it: len(it["choices"]) == 2, prompt=[[5, 6], [7]], max_tokens=1),
    "ids and texts mixed": completion(refused("prompt"), 400, prompt=[5, "Once"]),
    "no prompt": completion(refused("prompt"), 400, prompt=[]),
    "an empty prompt": completion(refused("prompt"), 400, prompt=""),
    "too many prompts": completion(refused("prompt"), 400, prompt=["a"] * 300),
    "echo repeats the prompt": completion(lambda it: text(it).startswith("Once upon a time"), echo=True),
    "echo alone": completion(
        lambda it: text(it) == "Once upon a time" and it["usage"]["completion_tokens"] == 0, echo=True, max_tokens=0
    ),
    "echo with logprobs, as lm-eval asks": completion(
        lambda it: (
            (lp := it["choices"][0]["logprobs"])["token_logprobs"][0] is None
            and len(lp["tokens"]) == len(lp["token_logprobs"]) == len(lp["top_logprobs"]) == len(lp["text_offset"]) == 5
            and "".join(lp["tokens"]) == text(it)
        ),
        echo=True,
        max_tokens=1,
        logprobs=1,
    ),
    "logprobs of a completion": completion(
        lambda it: all(len(top) in (2, 3) for top in it["choices"][0]["logprobs"]["top_logprobs"]), logprobs=2
    ),
    "prompt_logprobs": completion(
        lambda it: (found := it["choices"][0]["prompt_logprobs"])[0] is None and len(found) == 4, prompt_logprobs=1
    ),
    "suffix": completion(refused("suffix"), 400, suffix="the end"),
    "best_of": completion(refused("best_of"), 400, best_of=3),
    "stop": completion(
        lambda it: "small" not in text(it) and it["choices"][0]["stop_reason"] == "small", stop="small", max_tokens=30
    ),
    "stop that stays": completion(
        lambda it: text(it).endswith("small"), stop=["small"], max_tokens=30, include_stop_str_in_output=True
    ),
    "token ids out": completion(
        lambda it: len(it["choices"][0]["token_ids"]) == 3 and len(it["choices"][0]["prompt_token_ids"]) == 4,
        return_token_ids=True,
        max_tokens=3,
    ),
    "tokens as ids": completion(
        lambda it: it["choices"][0]["logprobs"]["tokens"][0].startswith("token_id:"),
        logprobs=0,
        return_tokens_as_token_ids=True,
    ),
    "logit_bias": completion(
        lambda it: it["choices"][0]["token_ids"] == [9, 9], logit_bias={"9": 100}, max_tokens=2, return_token_ids=True
    ),
    "logit_bias of words": completion(refused("logit_bias"), 400, logit_bias={"a": 1}),
    "structured_outputs regex": completion(
        lambda it: re.fullmatch("[0-9]{3}", text(it)), structured_outputs={"regex": "[0-9]{3}"}
    ),
    "structured_outputs choice": completion(
        lambda it: text(it) in {"yes", "no"}, structured_outputs={"choice": ["yes", "no"]}
    ),
    "structured_outputs json": completion(
        lambda it: json.loads(text(it))["city"] in {"Paris", "Rome"},
        structured_outputs={"json": CITY, "disable_any_whitespace": True},
        max_tokens=100,
    ),
    "guided_regex of older clients": completion(lambda it: re.fullmatch("[0-9]+", text(it)), guided_regex="[0-9]+"),
    "guided_choice of older clients": completion(lambda it: text(it) == "b", guided_choice=["b"]),
    "a schema and any object": completion(
        refused("structured_outputs.json"), 400, structured_outputs={"json": CITY, "json_object": True}
    ),
    "two constraints": completion(
        status=400, structured_outputs={"regex": "a"}, response_format={"type": "json_object"}
    ),
    "a grammar that is none": completion(refused("regex"), 400, structured_outputs={"regex": "(a"}),
    "beams": completion(lambda it: len(it["choices"]) == 3, use_beam_search=True, n=3, max_tokens=4),
    "priority above the caller's": completion(refused("priority"), 400, priority=5),
    "a lower priority": completion(priority=-5),
    "cache_salt": completion(cache_salt="mine"),
    "a seed of any sign": completion(seed=-1, temperature=1),
    "top_k -1 means all": completion(top_k=-1),
    "min_p above 1": completion(refused("min_p"), 400, min_p=2),
    "n 0": completion(refused("n"), 400, n=0),
    "n too large": completion(refused("n"), 400, n=100),
    "a field of another type": completion(refused("temperature"), 400, temperature="hot"),
    "NaN is no JSON": completion(status=400, temperature=float("nan")),
    "a negative max_tokens": completion(refused("max_tokens"), 400, max_tokens=-1),
    "max_tokens 0": completion(refused("max_tokens"), 400, max_tokens=0),
    "max_tokens beyond the context": completion(refused("max_tokens"), 400, max_tokens=100_000),
    "a field that is missing within another": chat(refused("messages[0].role"), 400, messages=[{"content": "Hi"}]),
    "an unknown field within another": completion(refused("stream_options.usage"), 400, stream_options={"usage": True}),
    "a field with a typing error": completion(lambda it: "did you mean top_p" in it["error"]["message"], 400, top_pp=1),
    "another model": completion(lambda it: it["error"]["type"] == "not_found_error", 404, model="gpt"),
    "no model means the served one": completion(lambda it: it["model"] == "demo", model=""),
    "user, metadata and their like": completion(user="u", metadata={"a": "b"}, service_tier="auto"),
    "store": completion(refused("store"), 400, store=True),
    "a chat": chat(lambda it: it["object"] == "chat.completion" and it["choices"][0]["message"]["role"] == "assistant"),
    "max_completion_tokens": chat(lambda it: it["usage"]["completion_tokens"] == 3, max_completion_tokens=3),
    "logprobs of a chat": chat(
        lambda it: all(
            len(each["top_logprobs"]) == 2 and bytes(each["bytes"]).decode() == each["token"]
            for each in it["choices"][0]["logprobs"]["content"]
        ),
        logprobs=True,
        top_logprobs=2,
    ),
    "top_logprobs alone": chat(refused("top_logprobs"), 400, top_logprobs=2),
    "content in pieces": chat(messages=[{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]),
    "developer is system": chat(messages=[{"role": "developer", "content": "Be brief."}, *CHAT]),
    "an image": chat(
        lambda it: it["error"]["param"] == "messages[0].content[0].type",
        400,
        messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}],
    ),
    "no messages": chat(refused("messages"), 400, messages=[]),
    "json_object": chat(lambda it: said(it).lstrip().startswith("{"), response_format={"type": "json_object"}),
    "a form that is not known": chat(refused("response_format.type"), 400, response_format={"type": "xml"}),
    "tools with auto, of a model that writes no calls": chat(refused("tool_choice"), 400, tools=[TOOL]),
    "tools with none": chat(
        lambda it: "tool_calls" not in it["choices"][0]["message"], tools=[TOOL], tool_choice="none"
    ),
    "a required tool": chat(
        lambda it: (
            it["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "weather"
            and it["choices"][0]["finish_reason"] == "tool_calls"
        ),
        tools=[TOOL],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=600,
    ),
    "a named tool": chat(
        lambda it: json.loads(it["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"])["city"],
        tools=[TOOL],
        tool_choice={"type": "function", "function": {"name": "weather"}},
        max_tokens=600,
    ),
    "a tool that is not there": chat(
        refused("tool_choice"), 400, tools=[TOOL], tool_choice={"type": "function", "function": {"name": "time"}}
    ),
    "a tool whose schema does not say that it is an object": chat(
        lambda it: it["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"].startswith("{"),
        tools=[{"type": "function", "function": {"name": "weather", "parameters": {}}}],
        tool_choice="required",
        max_tokens=30,
    ),
    "a tool whose schema is a reference": chat(
        lambda it: json.loads(it["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"])["city"],
        tools=[
            {"type": "function", "function": {"name": "w", "parameters": {"$ref": "#/$defs/a", "$defs": {"a": CITY}}}}
        ],
        tool_choice={"type": "function", "function": {"name": "w"}},
        max_tokens=600,
    ),
    "a tool whose schema is too deep": chat(
        status=400,
        tools=[{"type": "function", "function": {"name": "w", "parameters": nested(450)}}],
        tool_choice="required",
    ),
    "verbosity": chat(refused("verbosity"), 400, verbosity="low"),
    "special tokens around a chat": chat(refused("add_special_tokens"), 400, add_special_tokens=True),
    "tool_choice without tools": chat(refused("tool_choice"), 400, tool_choice="required"),
    "chat_template of a request": chat(refused("chat_template"), 400, chat_template="{{ messages }}"),
    "audio": chat(refused("modalities"), 400, modalities=["audio"]),
    "a response": Row(
        "/v1/responses",
        {"input": "Hi", "max_output_tokens": 4},
        lambda it: it["status"] == "incomplete" and it["output"][0]["content"][0]["type"] == "output_text",
    ),
    "a call that is cut short": Row(
        "/v1/responses",
        {
            "input": "Hi",
            "max_output_tokens": 4,
            "tools": [{"type": "function", "name": "w", "parameters": CITY}],
            "tool_choice": {"type": "function", "name": "w"},
        },
        lambda it: (
            (it["status"], it["output"][0]["type"], it["output"][0]["status"])
            == ("incomplete", "function_call", "incomplete")
        ),
    ),
    "a response by schema": Row(
        "/v1/responses",
        {
            "input": "Hi",
            "text": {"format": {"type": "json_schema", "name": "city", "schema": CITY}},
        },
        lambda it: json.loads(it["output"][0]["content"][0]["text"])["city"],
    ),
    "a summary of reasoning": Row(
        "/v1/responses", {"input": "Hi", "reasoning": {"summary": "auto"}}, refused("reasoning.summary"), 400
    ),
    "a response that goes on from another": Row(
        "/v1/responses", {"input": "Hi", "previous_response_id": "resp_1"}, refused("previous_response_id"), 400
    ),
    "a tool that only OpenAI runs": Row(
        "/v1/responses", {"input": "Hi", "tools": [{"type": "web_search"}]}, refused("tools"), 400
    ),
    "a message": Row(
        "/v1/messages",
        {"model": "demo", "max_tokens": 4, "system": "Be brief.", "messages": CHAT},
        lambda it: it["stop_reason"] == "max_tokens" and it["usage"]["output_tokens"] == 4,
    ),
    "a message whose last turn is the assistant's": Row(
        "/v1/messages",
        {"max_tokens": 4, "messages": [*CHAT, {"role": "assistant", "content": "Once"}]},
        lambda it: it["error"]["message"].startswith("messages: the last turn"),
        400,
    ),
    "a message by a role that is none": Row(
        "/v1/messages", {"max_tokens": 4, "messages": [{"role": "tool", "content": "Hi"}]}, status=400
    ),
    "a stop sequence that is empty": Row(
        "/v1/messages",
        {"max_tokens": 4, "messages": CHAT, "stop_sequences": [""]},
        lambda it: it["error"]["message"].startswith("stop_sequences:"),
        400,
    ),
    "a message with stop_sequences": Row(
        "/v1/messages",
        {"max_tokens": 400, "messages": CHAT, "temperature": 0, "stop_sequences": ["a"]},
        lambda it: (it["stop_reason"], it["stop_sequence"]) == ("stop_sequence", "a"),
    ),
    "a message without max_tokens": Row(
        "/v1/messages", {"messages": CHAT}, lambda it: it["error"]["type"] == "invalid_request_error", 400
    ),
    "tokens of a conversation": Row("/v1/messages/count_tokens", {"messages": CHAT}, lambda it: it["input_tokens"] > 3),
    "tokenize": Row(
        "/tokenize",
        {"prompt": "Once upon", "return_token_strs": True},
        lambda it: it["count"] == len(it["token_strs"]) == 2,
    ),
    "tokenize a chat": Row("/tokenize", {"messages": CHAT}, lambda it: it["count"] > 3),
    "detokenize": Row("/detokenize", {"tokens": [5, 6]}, lambda it: isinstance(it["prompt"], str)),
    "detokenize beyond the vocabulary": Row("/detokenize", {"tokens": [99_999_999]}, status=400),
    "models": Row("/v1/models", None, lambda it: it["data"][0]["id"] == "demo"),
    "models, for Anthropic's client": Row(
        "/v1/models", None, lambda it: it["data"][0]["type"] == "model", headers={"anthropic-version": "2023-06-01"}
    ),
    "one model": Row("/v1/models/demo", None, lambda it: it["max_model_len"] > 0),
    "a model that is not there": Row("/v1/models/gpt", None, status=404),
    "version": Row("/version", None, lambda it: it["version"]),
    "health": Row("/health", None),
    "the description": Row(
        "/openapi.json", None, lambda it: set(it["paths"]) >= {"/v1/chat/completions", "/v1/messages", "/tokenize"}
    ),
    "a path that is not there": Row("/v1/embeddings", {"input": "a"}, status=404),
    "another method": Row("/v1/completions", None, status=405),
    "a request id": Row(
        "/v1/completions",
        {"prompt": "Once", "max_tokens": 1, "request_id": "mine"},
        lambda it: it["id"] == "cmpl-mine",
    ),
    "a request id that is no text": Row(
        "/v1/completions", {"prompt": "Once"}, status=400, headers={"X-Request-Id": "\xff\x80"}
    ),
    "a deadline that passes": Row(
        "/v1/completions",
        {"prompt": "Once", "max_tokens": 900, "ignore_eos": True},
        lambda it: it["error"]["code"] == "DEADLINE_EXCEEDED",
        504,
        {"X-Request-Timeout": "0.05"},
    ),
    "a deadline that is none": Row(
        "/v1/completions", {"prompt": "Once"}, status=400, headers={"X-Request-Timeout": "soon"}
    ),
    "another content type": Row(
        "/v1/completions", {"prompt": "Once"}, status=400, headers={"Content-Type": "text/plain"}
    ),
}
