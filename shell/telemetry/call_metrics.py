"""gRPC calls as the server sees them: how many run, how many ended with which status."""

from __future__ import annotations

from collections.abc import Iterable

from shell.telemetry import metric_names as names
from shell.telemetry.metrics import Metrics, Reading


class CallMetrics:
    """A `shell.rpc.interceptors.CallObserver`."""

    def __init__(self, metrics: Metrics) -> None:
        self._ended = metrics.counter(names.GRPC_CALLS)
        self._in_flight: dict[str, int] = {}
        metrics.add_reader(self._read, names.GRPC_IN_FLIGHT)

    def began(self, method: str) -> None:
        """A call of `/package.Service/Method` came in."""
        self._in_flight[method] = self._in_flight.get(method, 0) + 1

    def ended(self, method: str, code: str) -> None:
        """Counts a call that ended with this status, such as `OK`."""
        self._in_flight[method] -= 1
        self._ended.add(1, *_parts(method), code)

    def _read(self) -> Iterable[Reading]:
        return [Reading(names.GRPC_IN_FLIGHT, count, _parts(method)) for method, count in self._in_flight.items()]


def _parts(method: str) -> tuple[str, str]:
    service, _, name = method.strip("/").rpartition("/")
    return service, name
