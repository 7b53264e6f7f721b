"""From VllmEngine's GenerateRequest to Tandem's own. Values are judged at the entrance, like everybody's.

proto3 scalars without presence cannot say 0: there 0 means unset, and the model's default holds.
"""

from __future__ import annotations

from typing import Any

from tandem.errors import InvalidRequest, UnsupportedOption
from tandem.foreign import vllm_engine_pb2
from tandem.v1 import inference_pb2

_ALIKE_IF_SET = ("temperature", "max_tokens", "logprobs", "prompt_logprobs")
"""Optional there: copied if present. Zero is a value."""
_ALIKE_UNLESS_ZERO = (
    *("top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"),
    *("min_tokens", "n"),
)
_CONSTRAINTS = frozenset({"json_schema", "regex", "grammar"})
"""Known to Tandem under the same names."""
_SEED_MASK = 2**64 - 1
_NOT_TAKEN = {
    "kv_transfer_params": "Tandem hands KV over by itself",
    "kv_transfer_params_json": "Tandem hands KV over by itself",
    "mm_inputs": "the model takes text only",
    "media_refs": "the model takes text only",
}


def read_request(request: vllm_engine_pb2.GenerateRequest) -> inference_pb2.GenerateRequest:
    """Raises InvalidRequest and UnsupportedOption that name the field."""
    for name, reason in _NOT_TAKEN.items():
        if request.HasField(name):
            raise UnsupportedOption(name, reason)
    if request.extra_mm_inputs:
        raise UnsupportedOption("extra_mm_inputs", "the model takes text only")
    check_rank("data_parallel_rank", request.data_parallel_rank)
    message = inference_pb2.GenerateRequest(request_id=request.request_id)
    match request.WhichOneof("input"):
        case "text":
            message.text = request.text
        case "tokenized":
            message.token_ids.ids.extend(request.tokenized.input_ids)
            message.token_ids.SetInParent()  # an empty prompt is the entrance's to refuse
        case _:
            raise InvalidRequest("input", "one of tokenized and text must be set")
    _copy_sampling(request.sampling_params, message.sampling)
    return message


def check_rank(field: str, rank: int) -> None:
    """There is one, 0. Raises InvalidRequest."""
    if rank != 0:
        raise InvalidRequest(field, f"there is no rank {rank}; a router is one rank, 0")


def _copy_sampling(given: vllm_engine_pb2.SamplingParams, sampling: inference_pb2.SamplingParams) -> None:
    for name in _ALIKE_IF_SET:
        if given.HasField(name):
            _set(sampling, name, getattr(given, name))
    for name in _ALIKE_UNLESS_ZERO:
        if getattr(given, name):
            _set(sampling, name, getattr(given, name))
    if given.HasField("truncate_prompt_tokens"):
        raise UnsupportedOption("sampling_params.truncate_prompt_tokens", "a prompt is never cut")
    if given.HasField("seed"):
        sampling.seed = given.seed & _SEED_MASK
    sampling.stop.extend(given.stop)
    sampling.stop_token_ids.extend(given.stop_token_ids)
    sampling.ignore_eos = given.ignore_eos
    sampling.include_stop = given.include_stop_str_in_output
    sampling.skip_special_tokens = given.skip_special_tokens
    if any(token_id < 0 for token_id in given.logit_bias):
        raise InvalidRequest("sampling_params.logit_bias", "ids must not be negative")
    for token_id, bias in given.logit_bias.items():
        sampling.logit_bias[token_id] = bias
    _copy_constraint(given, sampling)


def _copy_constraint(given: vllm_engine_pb2.SamplingParams, sampling: inference_pb2.SamplingParams) -> None:
    name = given.WhichOneof("constraint")
    if name is None:
        return
    if name == "choice":
        sampling.choice.choices.extend(given.choice.choices)
        sampling.choice.SetInParent()
    elif name in _CONSTRAINTS:
        _set(sampling, name, getattr(given, name))
    else:
        raise UnsupportedOption(f"sampling_params.{name}")


def _set(sampling: inference_pb2.SamplingParams, name: str, value: Any) -> None:
    """Some of their fields are signed where ours are not."""
    try:
        setattr(sampling, name, value)
    except ValueError as error:
        raise InvalidRequest(f"sampling_params.{name}", "must not be negative") from error
