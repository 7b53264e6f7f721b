"""From VllmEngine's GenerateRequest to the entrance's. Values are judged there, like everybody's.

proto3 scalars without presence cannot say 0: there 0 means unset, and the model's default holds.
"""

from __future__ import annotations

from typing import Any

from router.request import CompletionRequest, Prompt, TextPrompt, TokensPrompt
from router.sampling import SamplingRequest
from tandem.errors import InvalidRequest, UnsupportedOption
from tandem.foreign import vllm_engine_pb2 as pb

_ALIKE_IF_SET = ("temperature", "max_tokens", "logprobs", "prompt_logprobs")
"""Optional there: copied if present. Zero is a value."""
_ALIKE_UNLESS_ZERO = (
    *("top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"),
    *("min_tokens", "n"),
)
_SIGNED_THERE = ("logprobs", "prompt_logprobs")
_CONSTRAINTS = frozenset({"json_schema", "regex", "grammar"})
"""Known to Tandem under the same names."""
_SEED_MASK = 2**64 - 1
_NOT_TAKEN = {
    "kv_transfer_params": "Tandem hands KV over by itself",
    "kv_transfer_params_json": "Tandem hands KV over by itself",
    "mm_inputs": "the model takes text only",
    "media_refs": "the model takes text only",
}


def read_request(request: pb.GenerateRequest) -> CompletionRequest:
    """Raises InvalidRequest and UnsupportedOption that name the field."""
    for name, reason in _NOT_TAKEN.items():
        if request.HasField(name):
            raise UnsupportedOption(name, reason)
    if request.extra_mm_inputs:
        raise UnsupportedOption("extra_mm_inputs", "the model takes text only")
    check_rank("data_parallel_rank", request.data_parallel_rank)
    return CompletionRequest(
        prompt=_prompt(request), sampling=_sampling(request.sampling_params), request_id=request.request_id
    )


def check_rank(field: str, rank: int) -> None:
    """Checks that the rank is 0. Raises InvalidRequest."""
    if rank != 0:
        raise InvalidRequest(field, f"there is no rank {rank}; a router is one rank, 0")


def _prompt(request: pb.GenerateRequest) -> Prompt:
    match request.WhichOneof("input"):
        case "text":
            return TextPrompt(request.text)
        case "tokenized":
            return TokensPrompt(request.tokenized.input_ids)
        case _:
            raise InvalidRequest("input", "one of tokenized and text must be set")


def _sampling(given: pb.SamplingParams) -> SamplingRequest:
    values: dict[str, Any] = {name: getattr(given, name) for name in _ALIKE_IF_SET if given.HasField(name)}
    values |= {name: value for name in _ALIKE_UNLESS_ZERO if (value := getattr(given, name))}
    for name in _SIGNED_THERE:
        if values.get(name, 0) < 0:
            raise InvalidRequest(f"sampling_params.{name}", "must not be negative")
    if given.HasField("truncate_prompt_tokens"):
        raise UnsupportedOption("sampling_params.truncate_prompt_tokens", "a prompt is never cut")
    if given.HasField("seed"):
        values["seed"] = given.seed & _SEED_MASK
    if any(token_id < 0 for token_id in given.logit_bias):
        raise InvalidRequest("sampling_params.logit_bias", "ids must not be negative")
    return SamplingRequest(
        **values,
        **_constraint(given),
        stop=tuple(given.stop),
        stop_token_ids=tuple(given.stop_token_ids),
        ignore_eos=given.ignore_eos,
        include_stop=given.include_stop_str_in_output,
        skip_special_tokens=given.skip_special_tokens,
        logit_bias=given.logit_bias,
    )


def _constraint(given: pb.SamplingParams) -> dict[str, Any]:
    name = given.WhichOneof("constraint")
    if name is None:
        return {}
    if name == "choice":
        return {name: tuple(given.choice.choices)}
    if name == "json_object":
        return {"json_schema": '{"type": "object"}'} if given.json_object else {}
    if name not in _CONSTRAINTS:
        raise UnsupportedOption(f"sampling_params.{name}")
    return {name: getattr(given, name)}
