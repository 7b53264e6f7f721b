"""Which files ran within a window of time, told from the traces of `bench.walk_probe`. Pure.

A function counts where it did something of its own: it was called, or it was resumed and got on. A coroutine
that was resumed only to hand the result on to what it awaits does not count.

The way in of a request begins where the router's servicer is entered and ends at the first call into the
engine after that: from the caller's message to the sequence in a scheduled step. Processes whose engine was not
called have a little longer, lest it depend on chance whether they came to rest.

The way out of a token begins where the engine thread has made it and ends where the next one begins to be
made ready: from the step's result to the message to the client. On the worker's event loop the plan of the next
step is not part of it: what runs between the hand-over of the tokens to the router's stream and the next call
into the engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from bench.walk_probe import HOLD_S, Event, Function, Kind, Trace

Spans = Sequence[tuple[int, int]]
"""Begin and end of each request, monotonic nanoseconds, in order."""
Files = dict[str, list[str]]
"""Names of the functions that ran, by file."""

ROUTER = "router"
_FIRST = "Servicer.Generate"
_ENGINE = ("EngineThread.", "Runner.")
_STEP_ENDS = ("Runner.collect", "Runner.step")
"""The first of them that is there."""
_CODE_UNIT_BYTES = 2
"""A coroutine that stands still is resumed at the instruction after the one at which it is suspended."""
_HANDED_OVER = ".deltas"
"""Tokens of one step go to the stream of their router."""
_MOST = 0.75
"""Of all windows: two processes do not take turns in the same way each time."""
_REST_NS = round(HOLD_S / 2 * 1e9)
"""Less than a step is held up."""
_EDGE = 3
"""Tokens at either end of a stream that are not looked at."""


class WalkError(Exception):
    """The traces do not hold what a window begins or ends with."""


@dataclass(frozen=True, slots=True)
class Visit:
    """A function that did something, and when it was entered."""

    at_ns: int
    thread: int
    function: Function


@dataclass(slots=True)
class Process:
    """One trace, made ready for questions."""

    visits: list[Visit] = field(default_factory=list)
    exits: list[Visit] = field(default_factory=list)
    """Here `at_ns` is when it was left."""

    @classmethod
    def of(cls, trace: Trace) -> Process:
        """Matches entries and exits."""
        process = cls()
        stacks: dict[int, list[Event]] = {}
        for event in trace.events:
            stack = stacks.setdefault(event.thread, [])
            if event.enters:
                stack.append(event)
                continue
            entry = _pop(stack, event.function)
            if entry is not None and not 0 <= entry.instruction - event.instruction <= _CODE_UNIT_BYTES:
                function = trace.functions[event.function]
                process.visits.append(Visit(entry.at_ns, event.thread, function))
                process.exits.append(Visit(event.at_ns, event.thread, function))
        process.visits.sort(key=lambda visit: visit.at_ns)
        return process

    def first(self, wanted: Callable[[Function], bool], after_ns: int) -> Visit | None:
        """The first visit of such a function after that time."""
        return next((each for each in self.visits if each.at_ns > after_ns and wanted(each.function)), None)

    def between(self, begin_ns: int, end_ns: int) -> Iterator[Visit]:
        """Those that were entered within."""
        return (each for each in self.visits if begin_ns <= each.at_ns < end_ns)


Processes = Mapping[str, Process]
"""By module."""


def _pop(stack: list[Event], function: int) -> Event | None:
    """Its entry, and all above it, whose exits were not told: they were ended by an exception thrown into them."""
    for index in range(len(stack) - 1, -1, -1):
        if stack[index].function == function:
            entry = stack[index]
            del stack[index:]
            return entry
    return None


def way_in(processes: Processes, spans_ns: Spans) -> Files:
    """What ran for requests that were sent one after the other; each span is from the sending to the end.

    Raises WalkError.
    """
    return _files([_in_window(processes, begin_ns) for begin_ns, _ in spans_ns])


def way_out(processes: Processes, decode: str, spans_ns: Spans) -> Files:
    """What ran for every token but the first and last few; `spans_ns` as above. Raises WalkError."""
    ends = _step_ends(processes[decode])
    windows: list[set[Function]] = []
    for begin_ns, end_ns in spans_ns:
        own = [each for each in ends if begin_ns < each.at_ns < end_ns]
        for one, following in list(pairwise(own))[_EDGE:-_EDGE]:
            windows.append(_out_window(processes, decode, one, following.at_ns))
    return _files(windows)


def _in_window(processes: Processes, sent_ns: int) -> set[Function]:
    first = processes[ROUTER].first(lambda function: function.name.endswith(_FIRST), sent_ns)
    if first is None:
        raise WalkError(f"nothing called …{_FIRST} ran in the router")
    called = {name: process.first(_is_engine, first.at_ns) for name, process in processes.items()}
    calls_ns = {name: call.at_ns for name, call in called.items() if call is not None}
    if not calls_ns:
        raise WalkError("no engine was called")
    ended_ns = min(calls_ns.values())
    functions = {first.function}
    for name, process in processes.items():
        end_ns = ended_ns if calls_ns.get(name) == ended_ns else ended_ns + _REST_NS
        functions |= {visit.function for visit in process.between(first.at_ns, end_ns)}
    return functions


def _out_window(processes: Processes, decode: str, step: Visit, end_ns: int) -> set[Function]:
    functions = {
        visit.function
        for name, process in processes.items()
        if name != decode
        for visit in process.between(step.at_ns, end_ns)
    }
    loop = [each for each in processes[decode].between(step.at_ns, end_ns) if each.thread != step.thread]
    handed_over = next((index for index, each in enumerate(loop) if each.function.name.endswith(_HANDED_OVER)), None)
    if handed_over is None:
        raise WalkError(f"nothing called …{_HANDED_OVER} ran after a step")
    within = _nested(processes[decode], loop[handed_over])
    functions |= {each.function for each in loop[: handed_over + 1]}
    planning = True
    for visit in loop[handed_over + 1 :]:
        planning = planning and not _is_engine(visit.function)
        if not planning or visit.at_ns < within:
            functions.add(visit.function)
    return functions


def _nested(process: Process, visit: Visit) -> int:
    """When the function of this visit was left."""
    return next(
        each.at_ns
        for each in process.exits
        if each.at_ns >= visit.at_ns and each.thread == visit.thread and each.function == visit.function
    )


def _is_engine(function: Function) -> bool:
    return function.kind is Kind.FUNCTION and function.name.startswith(_ENGINE)


def _step_ends(process: Process) -> list[Visit]:
    for name in _STEP_ENDS:
        found = [each for each in process.exits if each.function.name == name]
        if found:
            return found
    raise WalkError(f"none of {', '.join(_STEP_ENDS)} ran")


def _files(windows: Sequence[set[Function]]) -> Files:
    """Of what ran in most windows. What ran in few only, such as heartbeats and ticks, is not theirs."""
    if not windows:
        raise WalkError("there is no window to look at")
    counts = Counter(function for window in windows for function in window)
    files: Files = {}
    for function, times in counts.items():
        if function.kind is Kind.FUNCTION and times >= _MOST * len(windows):
            files.setdefault(function.file, []).append(function.name)
    return {file: sorted(names) for file, names in sorted(files.items())}
