"""Reading ModelInferRequests: every coding of tensors, every way of saying a setting, refusals by name."""

from __future__ import annotations

import json
import struct
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.faces.kserve.model import INPUTS, OUTPUTS, configuration, metadata
from router.faces.kserve.request import _FITS, InferRequest, read_request
from router.request import CompletionRequest, TextPrompt
from router.sampling import SamplingRequest
from tandem.errors import InvalidRequest, UnsupportedOption
from tandem.foreign import kserve_pb2
from tandem.limits import Limits
from tandem.types import EarlyStopping


def raw_bytes(*values: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(value)) + value for value in values)


def request(*more: tuple[str, str, list[int], bytes], **parameters: Any) -> kserve_pb2.ModelInferRequest:
    """With a text, further raw tensors, and parameters."""
    message = kserve_pb2.ModelInferRequest(id="r", model_name="m")
    for name, datatype, shape, raw in (("text_input", "BYTES", [1], raw_bytes(b"Hi")), *more):
        message.inputs.add(name=name, datatype=datatype, shape=shape)
        message.raw_input_contents.append(raw)
    kinds = {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param"}
    for name, value in parameters.items():
        setattr(message.parameters[name], kinds[type(value)], value)
    return message


def as_json(sampling: Any) -> tuple[str, str, list[int], bytes]:
    return "sampling_parameters", "BYTES", [1], raw_bytes(json.dumps(sampling).encode())


def sampling_of(read: InferRequest) -> dict[str, Any]:
    (completion,) = read.completions
    unset = SamplingRequest()
    given = {field.name: getattr(completion.sampling, field.name) for field in fields(SamplingRequest)}
    return {name: value for name, value in given.items() if value != getattr(unset, name)}


@pytest.mark.parametrize(
    ("datatype", "raw"),
    [
        ("INT8", b"\x05"),
        ("INT16", b"\x05\x00"),
        ("INT32", b"\x05\x00\x00\x00"),
        ("INT64", struct.pack("<q", 5)),
        ("UINT8", b"\x05"),
        ("UINT16", b"\x05\x00"),
        ("UINT32", struct.pack("<I", 5)),
        ("UINT64", struct.pack("<Q", 5)),
        ("FP16", struct.pack("<e", 5)),
        ("FP32", struct.pack("<f", 5)),
        ("FP64", struct.pack("<d", 5)),
        ("BYTES", raw_bytes(b"5")),
    ],
)
def test_a_number_may_come_in_any_datatype(datatype: str, raw: bytes) -> None:
    assert sampling_of(read_request(request(("max_tokens", datatype, [1], raw)))) == {"max_tokens": 5}


@pytest.mark.parametrize(
    ("said", "means"),
    [
        ({"temperature": "0.5", "top_p": "1"}, {"temperature": 0.5, "top_p": 1.0}),
        (
            {"top_k": -1, "seed": -1, "n": 1, "beam_width": 1, "length_penalty": 1.0, "best_of": 1},
            {"top_k": 0, "n": 1},
        ),
        ({"stop": "one"}, {"stop": ("one",)}),
        ({"stop_words": ["one", "", "two"]}, {"stop": ("one", "two")}),
        ({"random_seed": 3, "min_length": 2}, {"seed": 3, "min_tokens": 2}),
        ({"include_stop_str_in_output": "True"}, {"include_stop": True}),
        ({"logit_bias": {"5": 1.5}}, {"logit_bias": {5: 1.5}}),
        ({"max_tokens": 4.0, "seed": None, "bad_words": []}, {"max_tokens": 4}),
        ({"stop_token_ids": [1, 2]}, {"stop_token_ids": (1, 2)}),
        ({"beam_width": 4, "length_penalty": "0.5"}, {"beam_width": 4, "length_penalty": 0.5}),
        ({"early_stopping": True}, {"early_stopping": EarlyStopping.ALWAYS}),
        ({"early_stopping": [0]}, {"early_stopping": EarlyStopping.HEURISTIC}),
        ({"early_stopping": "never"}, {"early_stopping": EarlyStopping.NEVER}),
    ],
)
def test_habits_of_existing_clients_are_understood(said: dict[str, Any], means: dict[str, Any]) -> None:
    assert sampling_of(read_request(request(as_json(said)))) == means


def many_inputs() -> kserve_pb2.ModelInferRequest:
    """Each takes eight bytes; together they would keep the event loop for seconds."""
    return request(*((f"{number}", "INT8", [0], b"") for number in range(200)))


def many_outputs() -> kserve_pb2.ModelInferRequest:
    message = request()
    for _ in range(200):
        message.outputs.add(name="text_output")
    return message


def with_contents_of_both_kinds() -> kserve_pb2.ModelInferRequest:
    message = request()
    message.inputs[0].contents.bytes_contents.append(b"Hi")
    return message


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (request(as_json({"heat": 1})), "heat"),
        (request(as_json({"max_tokens": 1.5})), "max_tokens"),
        (request(as_json({"early_stopping": "soon"})), "early_stopping"),
        (request(as_json({"early_stopping": 2})), "early_stopping"),
        (request(as_json({"max_tokens": True})), "max_tokens"),
        (request(as_json({"max_tokens": 2**64})), "max_tokens"),
        (request(as_json({"max_tokens": [1, 2]})), "max_tokens"),
        (request(as_json({"stop": [1]})), "stop"),
        (request(as_json({"stop": {"a": 1}})), "stop"),
        (request(as_json({"stop": "a"}), stop="b"), "stop"),
        (request(as_json({"ignore_eos": "perhaps"})), "ignore_eos"),
        (request(as_json({"logit_bias": "x"})), "logit_bias"),
        (request(as_json([1])), "inputs.sampling_parameters"),
        (request(("sampling_parameters", "BYTES", [1], raw_bytes(b"{"))), "inputs.sampling_parameters"),
        (request(("sampling_parameters", "BYTES", [0], b"")), "inputs.sampling_parameters"),
        (request(as_json({"seed": 1}), random_seed=2), "seed"),
        (request(("stream", "BOOL", [1], b"\x01"), streaming=True), "stream"),
        (request(("stop", "BYTES", [1], raw_bytes(b"\xff"))), "inputs.stop"),
        (request(("seed", "INT32", [2], b"\x01\x00\x00\x00")), "inputs.seed"),
        (request(("seed", "INT32", [-1], b"")), "inputs.seed"),
        (request(("seed", "INT32", [2**62] * 9, b"")), "inputs.seed"),
        (request(("seed", "BF16", [1], b"\x00\x00")), "inputs.seed"),
        (request(("stop", "BYTES", [1], b"\x09\x00\x00\x00ab")), "inputs.stop"),
        (request(("stop", "BYTES", [1], b"\x09\x00")), "inputs.stop"),
        (request(("stop", "BYTES", [1], raw_bytes(b"a", b"b"))), "inputs.stop"),
        (request(("text_input", "BYTES", [1], raw_bytes(b"a"))), "inputs.text_input"),
        (request(("stop", "BYTES", [1], raw_bytes(b"a") + b"\x09")), "inputs.stop"),
        (request(("stop", "BYTES", [1], b"\x00" * 4_000_000)), "inputs.stop"),
        (with_contents_of_both_kinds(), "inputs.text_input"),
        (request(as_json({"\ud800": 1})), "?"),
        (request(as_json({"stop": "\ud800"})), "stop"),
        (request(timeout=-1), "parameters.timeout"),
        (request(as_json({"timeout": 10**400})), "parameters.timeout"),
        (request(timeout="soon"), "parameters.timeout"),
        (request(priority=2**40), "parameters.priority"),
        (request(exclude_input_in_output=False, stream=True), "exclude_input_in_output"),
        # What would cost too much to read, or to copy for each text:
        (request(("stop_token_ids", "UINT8", [5000], b"\x01" * 5000)), "inputs.stop_token_ids"),
        (request(("a", "UINT8", [2500], bytes(2500)), ("b", "UINT8", [2500], bytes(2500))), "inputs.b"),
        (request(as_json({"stop_token_ids": [1] * 5000})), "stop_token_ids"),
        (request(as_json({"logit_bias": dict.fromkeys(range(5000), 1)})), "logit_bias"),
        (request(as_json({"stop": "x" * 200_000})), "inputs.sampling_parameters"),
        (many_inputs(), "inputs"),
        (many_outputs(), "outputs"),
        (request(**{f"{number}": 1 for number in range(200)}), "parameters"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_does_not_fit_or_costs_too_much_is_refused_by_name(
    message: kserve_pb2.ModelInferRequest, field: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_request(message)

    assert caught.value.field == field


@pytest.mark.parametrize(
    ("parameters", "field"),
    [
        ({"image": "x"}, "image"),
        ({"embedding_request": "x"}, "embedding_request"),
        ({"sequence_id": "x"}, "sequence_id"),
        ({"return_logprobs": True}, "return_logprobs"),
        ({"bad_words": "x"}, "bad_words"),
        ({"n": 2}, "sampling.n"),
    ],
)
def test_features_that_are_not_there_are_refused_by_name(parameters: dict[str, Any], field: str) -> None:
    with pytest.raises(UnsupportedOption) as caught:
        read_request(request(**parameters))

    assert caught.value.field == field


def test_every_field_of_sampling_has_a_way_in() -> None:
    assert set(_FITS) == {field.name for field in fields(SamplingRequest)}


def test_shared_memory_is_refused_by_name() -> None:
    message = request()
    message.inputs[0].parameters["shared_memory_region"].string_param = "region"

    with pytest.raises(UnsupportedOption, match="shared memory"):
        read_request(message)


@pytest.mark.parametrize("shape", [[], [2], [1, 2], [1, 1, 1], [65]])
def test_a_text_has_one_of_two_shapes(shape: list[int]) -> None:
    message = request()
    message.inputs[0].shape[:] = shape
    del message.raw_input_contents[:]
    count = 65 if shape == [65] else 1
    message.inputs[0].contents.bytes_contents.extend([b"Hi"] * count)

    with pytest.raises(InvalidRequest, match=r"inputs\.text_input"):
        read_request(message)


def test_settings_of_the_protocol_are_read() -> None:
    read = read_request(request(timeout=1_500_000, priority=3, triton_enable_empty_final_response=True, streaming=True))

    assert (read.timeout_s, read.empty_final_response, read.stream) == (1.5, True, True)
    (completion,) = read.completions
    assert completion == CompletionRequest(TextPrompt("Hi"), SamplingRequest(), "r", "m", -3)


def test_inputs_switch_outputs_on_and_off() -> None:
    read = read_request(request(return_finish_reason=False, return_num_input_tokens=True))

    assert read.outputs == ("text_output", "num_input_tokens")


def test_settings_at_their_default_caps_are_read() -> None:
    limits = Limits()
    stop = [chr(0xE9) * (limits.max_stop_bytes // 2 - 8) + f"{number}" for number in range(limits.max_stop_strings)]
    bias = {f"{token_id}": -12.345678 for token_id in range(100_000, 100_000 + limits.max_logit_bias)}
    stop_token_ids = list(range(100_000, 100_000 + limits.max_stop_token_ids))

    read = read_request(request(as_json({"stop": stop, "logit_bias": bias, "stop_token_ids": stop_token_ids})))

    assert list(read.completions[0].sampling.stop) == stop


def test_a_long_name_is_cut_in_the_error() -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_request(request(**{"x" * 10_000: 1}))

    assert len(caught.value.message) < 200


def test_metadata_and_configuration_name_the_same_tensors() -> None:
    said, configured = metadata("m"), configuration("m")

    assert [each.name for each in said.inputs] == [each.name for each in configured.input] == list(INPUTS)
    assert [each.name for each in said.outputs] == [each.name for each in configured.output] == list(OUTPUTS)


parameter_values = st.one_of(
    st.booleans().map(lambda value: kserve_pb2.InferParameter(bool_param=value)),
    st.integers(-(2**63), 2**63 - 1).map(lambda value: kserve_pb2.InferParameter(int64_param=value)),
    st.text(max_size=9).map(lambda value: kserve_pb2.InferParameter(string_param=value)),
    st.floats().map(lambda value: kserve_pb2.InferParameter(double_param=value)),
    st.just(kserve_pb2.InferParameter()),
)
names = st.sampled_from(
    [*INPUTS, "streaming", "stop_words", "choice", "logit_bias", "json_schema", "n", "timeout", "x"]
)
tensors = st.tuples(
    names,
    st.sampled_from(["BYTES", "BOOL", "INT32", "FP16", "FP32", "UINT64", "", "BF16"]),
    st.lists(st.integers(-2, 3), max_size=3),
    st.binary(max_size=16),
)
any_text = st.text(st.characters(), max_size=5)
"""Lone surrogates too, which JSON can say and protobuf cannot."""
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(-(10**400), 10**400) | st.floats() | any_text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names | any_text, inner, max_size=4),
    max_leaves=8,
)
json_objects = st.dictionaries(names | any_text | st.just("\ud800"), json_values, max_size=4)


@settings(max_examples=300, deadline=None)
@given(st.lists(tensors, max_size=3), st.dictionaries(names, parameter_values, max_size=4), json_objects | json_values)
def test_whatever_comes_is_read_or_refused(
    more: list[tuple[str, str, list[int], bytes]], parameters: dict[str, kserve_pb2.InferParameter], sampling: Any
) -> None:
    message = request(*more, as_json(sampling))
    for name, value in parameters.items():
        message.parameters[name].CopyFrom(value)

    try:
        read = read_request(message)
    except (InvalidRequest, UnsupportedOption) as error:
        f"{error.message} {error.field}".encode()  # both go into a status
        return
    assert read.completions[0].prompt == TextPrompt("Hi")
