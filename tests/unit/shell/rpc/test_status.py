from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2, status_pb2

from shell.rpc.server import RpcServer, Service
from shell.rpc.status import status_code
from tandem import errors
from tandem.errors import Reason, TandemError
from tandem.rpc.received_error import error_from_rpc
from tandem.v1 import inference_pb2, inference_pb2_grpc

Serve = Callable[..., Awaitable[tuple[RpcServer, grpc.aio.Channel]]]

ERRORS: list[TandemError] = [
    TandemError("root"),
    errors.InvalidRequest("sampling.top_p", "must be in (0, 1]"),
    errors.UnsupportedOption("sampling.n"),
    errors.ModelNotFound("gpt-5 is not served"),
    errors.Unauthenticated("a bearer token is needed"),
    errors.Overloaded("queue is full", retry_after_s=2.5),
    errors.Unavailable("no decode worker"),
    errors.Unavailable("decode-0 is gone", Reason.WORKER_LOST),
    errors.PrefixNotHeld("100 of 4096 tokens are held"),
    errors.Unavailable("stopping", Reason.DRAINING),
    errors.Unavailable("the certificate has expired", Reason.TLS_FAILED),
    errors.DeadlineExceeded("5 s"),
    errors.TransferError("hand-off failed"),
    errors.TicketRefused("expired"),
    errors.ChecksumMismatch("block 3"),
    errors.HandshakeMismatch("dtype", "float32", "bfloat16"),
    errors.FrameError("bad magic"),
    errors.PeerLost("prefill-0"),
    errors.ConfigError("--listen", "in use"),
    errors.CheckpointError("config.json: vocab_size"),
    errors.InvalidOutput("worker d told a token beyond the vocabulary"),
    errors.Unavailable("worker d is registered", Reason.WORKER_ID_TAKEN),
    errors.InternalError("at step 3, with ümlaut"),
]


class Raising(inference_pb2_grpc.InferenceServiceServicer):
    """Raises what it was given."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    async def Tokenize(self, request: object, context: object) -> object:  # noqa: N802
        raise self._error


def service(error: BaseException) -> Service:
    return Service(
        "tandem.v1.InferenceService",
        lambda server: inference_pb2_grpc.add_InferenceServiceServicer_to_server(Raising(error), server),
    )


async def call_that_raises(serve: Serve, error: BaseException) -> grpc.aio.AioRpcError:
    _, channel = await serve(service(error))
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await inference_pb2_grpc.InferenceServiceStub(channel).Tokenize(inference_pb2.TokenizeRequest(), timeout=5)
    return raised.value


def test_each_class_has_a_status_of_its_own_or_of_a_base_that_is_meant() -> None:
    defined = {each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, TandemError)}
    assert {type(error) for error in ERRORS} == defined
    internal = {type(error) for error in ERRORS if status_code(error) is grpc.StatusCode.INTERNAL}
    assert internal == {TandemError, errors.InternalError, errors.InvalidOutput}
    lost = {type(error) for error in ERRORS if status_code(error) is grpc.StatusCode.DATA_LOSS}
    assert lost == {each for each in defined if issubclass(each, errors.TransferError)} - {errors.HandshakeMismatch}


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
async def test_an_error_crosses_the_wire_whole(serve: Serve, error: TandemError) -> None:
    raised = await call_that_raises(serve, error)
    read = error_from_rpc(raised)

    assert raised.code() is status_code(error)
    assert type(read) is (errors.InternalError if type(error) is TandemError else type(error))
    assert (read.message, read.reason) == (error.message, error.reason)
    for name in ("field", "option", "retry_after_s"):
        assert getattr(read, name, None) == getattr(error, name, None)


async def test_details_are_what_other_languages_read(serve: Serve) -> None:
    raised = await call_that_raises(serve, errors.InvalidRequest("prompt", "is empty"))
    status = status_pb2.Status.FromString(dict(raised.trailing_metadata())["grpc-status-details-bin"])
    violations = error_details_pb2.BadRequest()

    assert any(detail.Unpack(violations) for detail in status.details)
    assert [each.field for each in violations.field_violations] == ["prompt"]


async def test_a_bug_is_internal_and_keeps_its_words_to_the_log(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    raised = await call_that_raises(serve, ValueError("the prompt was: secret"))
    (record,) = [record for record in caplog.records if record.getMessage() == "handler failed"]

    assert raised.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in (raised.details() or "")
    assert record.fields["error_id"] in (raised.details() or "")  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("code", "cls"),
    [
        (grpc.StatusCode.UNAVAILABLE, errors.Unavailable),
        (grpc.StatusCode.DEADLINE_EXCEEDED, errors.DeadlineExceeded),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, errors.Overloaded),
        (grpc.StatusCode.UNKNOWN, errors.InternalError),
    ],
)
def test_a_status_that_grpc_itself_made_is_read_by_its_code(code: grpc.StatusCode, cls: type[TandemError]) -> None:
    raised = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), "why")

    assert type(error_from_rpc(raised)) is cls


def test_a_message_that_is_too_long_is_not_to_be_sent_again() -> None:
    raised = grpc.aio.AioRpcError(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.aio.Metadata(),
        grpc.aio.Metadata(),
        "CLIENT: Received message larger than max (9000000 vs. 8388608)",
    )

    assert not error_from_rpc(raised).retryable


def test_details_that_are_no_details_are_passed_over() -> None:
    metadata = grpc.aio.Metadata(("grpc-status-details-bin", b"\xff\xff"))
    raised = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), metadata, "why")

    assert isinstance(error_from_rpc(raised), errors.Unavailable)


async def test_a_cancellation_that_a_handler_leaks_is_answered(serve: Serve) -> None:
    raised = await call_that_raises(serve, asyncio.CancelledError())

    assert raised.code() is grpc.StatusCode.INTERNAL
