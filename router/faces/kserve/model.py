"""What the KServe face says of the model: its tensors, as metadata and as Triton's configuration."""

from __future__ import annotations

from collections.abc import Mapping

from tandem.foreign import kserve_model_config_pb2 as config_pb2
from tandem.foreign import kserve_pb2 as pb

VERSION = "1"
"""Version of the model: a router serves a single checkpoint."""
PLATFORM = "tandem"
DEFAULT_OUTPUTS = ("text_output", "finish_reason")
OUTPUTS: Mapping[str, str] = {
    "text_output": "BYTES",
    "finish_reason": "BYTES",
    "num_input_tokens": "UINT32",
    "num_output_tokens": "UINT32",
    "num_cached_tokens": "UINT32",
}
"""Datatype by name."""
INPUTS: Mapping[str, str] = {
    "text_input": "BYTES",
    "stream": "BOOL",
    "sampling_parameters": "BYTES",
    "exclude_input_in_output": "BOOL",
    "return_finish_reason": "BOOL",
    "return_num_input_tokens": "BOOL",
    "return_num_output_tokens": "BOOL",
    "return_num_cached_tokens": "BOOL",
    "max_tokens": "INT32",
    "min_tokens": "INT32",
    "temperature": "FP32",
    "top_k": "INT32",
    "top_p": "FP32",
    "min_p": "FP32",
    "repetition_penalty": "FP32",
    "presence_penalty": "FP32",
    "frequency_penalty": "FP32",
    "seed": "UINT64",
    "stop": "BYTES",
    "stop_token_ids": "INT32",
    "include_stop": "BOOL",
    "ignore_eos": "BOOL",
    "skip_special_tokens": "BOOL",
}
"""Datatype by name, as announced; any datatype that holds the value is taken. All but the first are optional."""
_MANY = frozenset({"text_input", "stop", "stop_token_ids"})
_DATA_TYPES = {"BYTES": "TYPE_STRING"}
"""Where Triton's configuration has another name than the protocol."""


def metadata(model: str) -> pb.ModelMetadataResponse:
    """For ModelMetadata."""
    tensor = pb.ModelMetadataResponse.TensorMetadata
    return pb.ModelMetadataResponse(
        name=model,
        versions=[VERSION],
        platform=PLATFORM,
        inputs=[tensor(name=name, datatype=datatype, shape=_shape(name)) for name, datatype in INPUTS.items()],
        outputs=[tensor(name=name, datatype=datatype, shape=[-1]) for name, datatype in OUTPUTS.items()],
    )


def configuration(model: str) -> config_pb2.ModelConfig:
    """For ModelConfig."""
    return config_pb2.ModelConfig(
        name=model,
        platform=PLATFORM,
        backend=PLATFORM,
        max_batch_size=0,
        input=[
            config_pb2.ModelInput(
                name=name, data_type=_data_type(datatype), dims=_shape(name), optional=name != "text_input"
            )
            for name, datatype in INPUTS.items()
        ],
        output=[
            config_pb2.ModelOutput(name=name, data_type=_data_type(datatype), dims=[-1])
            for name, datatype in OUTPUTS.items()
        ],
        model_transaction_policy=config_pb2.ModelTransactionPolicy(decoupled=True),
    )


def _shape(name: str) -> list[int]:
    return [-1] if name in _MANY else [1]


def _data_type(datatype: str) -> str:
    return _DATA_TYPES.get(datatype, f"TYPE_{datatype}")
