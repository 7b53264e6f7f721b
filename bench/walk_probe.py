"""Runs one Tandem process under a profiler that notes which functions ran, and when.

`python -m bench.walk_probe OUT MODULE ARG…` becomes `python -m MODULE ARG…`; at the end of the process OUT
holds a `Trace`. Only functions of the product are noted: files below the folder that holds the `tandem`
package, generated stubs, tests and benchmarks left out. Every engine step is held up by `HOLD_S`, so that
what follows one step has ended before the next one does. Knows nothing of requests.
"""

from __future__ import annotations

import atexit
import enum
import json
import runpy
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import tandem

ROOT = Path(tandem.__file__).resolve().parents[1]
HOLD_S = 0.02
STEP_BEGINS = "Runner.launch"
"""The function of the engine thread that begins a step."""
_CONSTRUCTORS = frozenset({"__init__", "__new__", "__post_init__"})
_QUESTIONS = frozenset({"__len__", "__contains__", "__iter__", "__bool__", "__getitem__", "__eq__", "__hash__"})
_LEFT_OUT = ("bench", "tests", ".venv")


class Kind(enum.StrEnum):
    """What a function is to its callers."""

    FUNCTION = "function"
    CONSTRUCTOR = "constructor"
    PROPERTY = "property"
    """Or `len`, `in` and the like."""


@dataclass(frozen=True, slots=True)
class Function:
    """One function of the product."""

    file: str
    """Relative to the checkout."""
    name: str
    """Qualified."""
    kind: Kind


@dataclass(frozen=True, slots=True)
class Event:
    """A function was entered or resumed (`enters`), or left or suspended."""

    at_ns: int
    """Monotonic, alike for all processes of one machine."""
    thread: int
    function: int
    """Index in `Trace.functions`."""
    enters: bool
    instruction: int
    """Offset in bytes of the instruction where the function stood."""


@dataclass(slots=True)
class Trace:
    """What one process ran, in the order of time on each thread."""

    functions: list[Function] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    def write(self, path: Path) -> None:
        """As JSON, short."""
        functions = [(each.file, each.name, each.kind) for each in self.functions]
        events = [(e.at_ns, e.thread, e.function, e.enters, e.instruction) for e in self.events]
        path.write_text(json.dumps({"functions": functions, "events": events}))

    @classmethod
    def read(cls, path: Path) -> Trace:
        """What `write` has written."""
        document = json.loads(path.read_text())
        functions = [Function(file, name, Kind(kind)) for file, name, kind in document["functions"]]
        return cls(functions, [Event(*each) for each in document["events"]])


def product_file(filename: str) -> str | None:
    """The file's path in the checkout if it belongs to the product; None for all others."""
    if not filename.startswith(f"{ROOT}/"):
        return None
    path = Path(filename).relative_to(ROOT)
    return None if path.parts[0] in _LEFT_OUT or "_pb2" in path.name else str(path)


def kind_of(code: CodeType, namespace: dict[str, Any]) -> Kind:
    """`namespace`: the globals of the function's module."""
    outermost = code.co_qualname.partition(".<locals>")[0].split(".")
    if outermost[-1] in _CONSTRUCTORS:
        return Kind.CONSTRUCTOR
    if outermost[-1] in _QUESTIONS:
        return Kind.PROPERTY
    found: Any = namespace.get(outermost[0])
    for part in outermost[1:]:
        found = vars(found).get(part) if isinstance(found, type) else None
    return Kind.PROPERTY if isinstance(found, property) else Kind.FUNCTION


class Probe:
    """Notes every entry and exit of a product function, on this thread and on all that start after `start`."""

    def __init__(self) -> None:
        self.trace = Trace()
        self._known: dict[CodeType, int | None] = {}
        self._threads: Iterator[int] = iter(range(sys.maxsize))
        self._local = threading.local()

    def start(self) -> None:
        """From now on."""
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def finish(self, path: Path) -> None:
        """Ends it for this thread and writes the trace."""
        sys.setprofile(None)
        self.trace.write(path)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if event not in {"call", "return"}:
            return
        code = frame.f_code
        try:
            index = self._known[code]
        except KeyError:
            index = self._known[code] = self._index_of(frame)
        if index is not None:
            now_ns = time.monotonic_ns()
            self.trace.events.append(Event(now_ns, self._thread(), index, event == "call", frame.f_lasti))
            if event == "call" and code.co_qualname == STEP_BEGINS:
                time.sleep(HOLD_S)

    def _index_of(self, frame: FrameType) -> int | None:
        code = frame.f_code
        file = product_file(code.co_filename)
        if file is None:
            return None
        self.trace.functions.append(Function(file, code.co_qualname, kind_of(code, frame.f_globals)))
        return len(self.trace.functions) - 1

    def _thread(self) -> int:
        """A small number of its own for each thread."""
        if not hasattr(self._local, "number"):
            self._local.number = next(self._threads)
        number: int = self._local.number
        return number


def main() -> None:
    """Becomes the module that is named."""
    out, module, *arguments = sys.argv[1:]
    probe = Probe()
    atexit.register(probe.finish, Path(out).absolute())
    sys.argv = [module, *arguments]
    probe.start()
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
