"""The exception tree, and the reasons that clients see in `ErrorInfo.reason`.

    TandemError
    ├── InvalidRequest          a field of the request is wrong           INVALID_ARGUMENT
    ├── UnsupportedOption       a field whose feature is not built        UNIMPLEMENTED
    ├── ModelNotFound           another model is served                   NOT_FOUND
    ├── Unauthenticated         no bearer token, or a wrong one           UNAUTHENTICATED
    ├── Overloaded              bounded queues are full; try later        RESOURCE_EXHAUSTED
    ├── Unavailable             no capable worker, or it was lost         UNAVAILABLE
    ├── PrefixNotHeld           a decode worker's cache lacks the prompt  UNAVAILABLE
    ├── DeadlineExceeded        the request's or a peer's time ran out    DEADLINE_EXCEEDED
    ├── TransferError           KV could not be handed over               DATA_LOSS
    │   ├── TicketRefused       stale, replayed, forged, out of range
    │   ├── ChecksumMismatch    bytes differ from what was announced
    │   ├── HandshakeMismatch   model, layout, dtype or protocol differ   FAILED_PRECONDITION
    │   ├── FrameError          not a frame of this protocol
    │   └── PeerLost            the connection or the peer's process ended
    ├── ConfigError             a bad option or environment variable      exit code 2
    ├── CheckpointError         a model folder that cannot be served      exit code 2
    ├── InvalidOutput           a worker told what cannot be true         INTERNAL
    └── InternalError           our own bug                               INTERNAL

Messages carry ids and numbers, never prompts. The table from class to gRPC status is in
`shell/rpc/status.py`; nothing here knows gRPC.
"""

from __future__ import annotations

from collections.abc import Mapping

from tandem.str_enum import StrEnum


class Reason(StrEnum):
    """Machine-readable cause; documented in docs/protocol.md."""

    INVALID_FIELD = "INVALID_FIELD"
    OPTION_NOT_SUPPORTED = "OPTION_NOT_SUPPORTED"
    MODEL_NOT_FOUND = "MODEL_NOT_FOUND"
    UNAUTHENTICATED = "UNAUTHENTICATED"
    QUEUE_FULL = "QUEUE_FULL"
    NO_CAPABLE_WORKER = "NO_CAPABLE_WORKER"
    PREFIX_NOT_HELD = "PREFIX_NOT_HELD"
    WORKER_LOST = "WORKER_LOST"
    MODEL_CHANGED = "MODEL_CHANGED"
    DRAINING = "DRAINING"
    WORKER_ID_TAKEN = "WORKER_ID_TAKEN"
    TLS_FAILED = "TLS_FAILED"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    TRANSFER_FAILED = "TRANSFER_FAILED"
    TICKET_REFUSED = "TICKET_REFUSED"
    CHECKSUM_MISMATCH = "CHECKSUM_MISMATCH"
    HANDSHAKE_MISMATCH = "HANDSHAKE_MISMATCH"
    FRAME_ERROR = "FRAME_ERROR"
    PEER_LOST = "PEER_LOST"
    BAD_CONFIG = "BAD_CONFIG"
    BAD_CHECKPOINT = "BAD_CHECKPOINT"
    INVALID_OUTPUT = "INVALID_OUTPUT"
    INTERNAL = "INTERNAL"


class TandemError(Exception):
    """Root of what Tandem raises on purpose. `retryable`: another pair of workers may do better.

    `field` names what is at fault, where one thing is: a field of the request, an option, a property of the layout.
    """

    reason: Reason = Reason.INTERNAL
    retryable: bool = False
    retry_after_s: float = 1.0
    """Seconds after which to try again, for Overloaded and for Unavailable with reason MODEL_CHANGED."""

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.field = field


class InvalidRequest(TandemError):
    """A field of the request is wrong; `field` is its path, such as `sampling.top_p`."""

    reason = Reason.INVALID_FIELD

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}", field)


class UnsupportedOption(TandemError):
    """A known field whose feature this version does not have."""

    reason = Reason.OPTION_NOT_SUPPORTED

    def __init__(self, field: str, message: str = "not supported by this version") -> None:
        super().__init__(f"{field}: {message}", field)


class ModelNotFound(TandemError):
    """The model asked for is not served here."""

    reason = Reason.MODEL_NOT_FOUND


class Unauthenticated(TandemError):
    """The caller brought no bearer token, or an unknown token."""

    reason = Reason.UNAUTHENTICATED


class Overloaded(TandemError):
    """A bounded queue or pool is full."""

    reason = Reason.QUEUE_FULL
    retryable = True

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unavailable(TandemError):
    """No worker can do it now, or the one that did it was lost."""

    reason = Reason.NO_CAPABLE_WORKER
    retryable = True

    def __init__(self, message: str, reason: Reason = Reason.NO_CAPABLE_WORKER) -> None:
        super().__init__(message)
        self.reason = reason


class PrefixNotHeld(TandemError):
    """A decode worker was to compute the end of a prompt whose beginning its cache does not hold (any more)."""

    reason = Reason.PREFIX_NOT_HELD
    retryable = True


class DeadlineExceeded(TandemError):
    """The request's own deadline, or the time a peer was given, ran out."""

    reason = Reason.DEADLINE_EXCEEDED


class TransferError(TandemError):
    """A KV hand-off failed; no token comes from its blocks."""

    reason = Reason.TRANSFER_FAILED
    retryable = True


class TicketRefused(TransferError):
    """The ticket is stale, replayed, forged, or names blocks that are not its own."""

    reason = Reason.TICKET_REFUSED


class ChecksumMismatch(TransferError):
    """Bytes in a block differ from what the sender announced."""

    reason = Reason.CHECKSUM_MISMATCH


class HandshakeMismatch(TransferError):
    """The two sides differ in `field`; no bytes were moved."""

    reason = Reason.HANDSHAKE_MISMATCH
    retryable = False

    def __init__(self, field: str, ours: str, theirs: str) -> None:
        super().__init__(f"{field} differs: ours {ours}, theirs {theirs}", field)


class FrameError(TransferError):
    """Bytes that are no frame of this protocol."""

    reason = Reason.FRAME_ERROR


class PeerLost(TransferError):
    """The peer's connection or process ended."""

    reason = Reason.PEER_LOST


class ConfigError(TandemError):
    """A bad option or environment variable; `field` is its name on the command line."""

    reason = Reason.BAD_CONFIG

    def __init__(self, option: str, message: str) -> None:
        super().__init__(f"{option}: {message}", option)


class CheckpointError(TandemError):
    """A model folder that cannot be served; the message names the file or tensor."""

    reason = Reason.BAD_CHECKPOINT


class InternalError(TandemError):
    """Our own bug; the message says where."""


class InvalidOutput(TandemError):
    """A worker told what cannot be true: it is at fault, and another one may do better."""

    reason = Reason.INVALID_OUTPUT
    retryable = True


_BY_REASON: Mapping[str, type[TandemError]] = {
    **{each.reason.value: each for each in (*TandemError.__subclasses__(), *TransferError.__subclasses__())},
    **dict.fromkeys(("WORKER_LOST", "MODEL_CHANGED", "DRAINING", "WORKER_ID_TAKEN", "TLS_FAILED"), Unavailable),
}


def rebuild_error(reason: str, message: str, *, field: str = "", retry_after_s: float = 1.0) -> TandemError:
    """The error that another process raised, of the same class, from what came over the wire.

    A reason that this version does not know becomes an InternalError.
    """
    cls = _BY_REASON.get(reason, InternalError)
    error = cls.__new__(cls)  # not __init__: `message` already holds what it would add
    TandemError.__init__(error, message, field)
    error.retry_after_s = retry_after_s
    if reason in _BY_REASON:
        error.reason = Reason(reason)
    return error
