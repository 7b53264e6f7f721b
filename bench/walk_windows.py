"""Which files ran within a window of time, told from the traces of `bench.walk_probe`. Pure.

A function counts where it did something of its own: it was called, or it was resumed and got on. A coroutine
that was resumed only to hand the result on to what it awaits does not count.

The way in of a request begins where the router's servicer is entered and ends at the first call into the
engine after that: from the caller's message to the sequence in a scheduled step. Processes whose engine was not
called have a little longer, lest it depend on chance whether they came to rest.

The way out of a token begins where the step's result is there and ends where the next one's is: from the engine to
the message to the client. The engine's own threads are not looked at. On the worker's event loop the task that hands
tokens over to their router's stream is the one that plans and launches steps as well: of that task, only what ran
until the hand-over had ended is part of the way; of all others, everything. So it does not matter how many steps
are in flight, and when the next one is planned.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise, takewhile

from bench.walk_probe import HOLD_S, Event, Function, Kind, Trace

Spans = Sequence[tuple[int, int]]
"""Begin and end of each request, monotonic nanoseconds, in order."""
Files = dict[str, list[str]]
"""Names of the functions that ran, by file."""

ROUTER = "router"
_FIRST = "Servicer.Generate"
_ENGINE = ("EngineThread.", "Runner.")
_STEP_ENDS = "Runner.collect"
_CODE_UNIT_BYTES = 2
"""A coroutine that stands still is resumed at the instruction after the one at which it is suspended."""
_HANDS_OVER = frozenset({"RouterSession.token_rows", "RouterSession.token"})
"""Tokens go to the stream of their router: all bare ones of a step, or one by one."""
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
    """A function that was entered, or resumed, and left, or suspended."""

    at_ns: int
    left_ns: int
    thread: int
    function: Function
    did_something: bool
    """False: resumed only to hand the result on."""

    def encloses(self, at_ns: int, thread: int) -> bool:
        """Whether it ran at that time."""
        return self.thread == thread and self.at_ns <= at_ns < self.left_ns


@dataclass(slots=True)
class Process:
    """One trace, made ready for questions."""

    calls: list[Visit] = field(default_factory=list)
    """Whether or not they did something; in the order of their begins, as `visits` are."""
    visits: list[Visit] = field(default_factory=list)

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
            if entry is not None:
                did_something = not 0 <= entry.instruction - event.instruction <= _CODE_UNIT_BYTES
                function = trace.functions[event.function]
                process.calls.append(Visit(entry.at_ns, event.at_ns, event.thread, function, did_something))
        process.calls.sort(key=lambda visit: (visit.at_ns, -visit.left_ns))
        process.visits = [visit for visit in process.calls if visit.did_something]
        return process

    def first(self, wanted: Callable[[Function], bool], after_ns: int) -> Visit | None:
        """The first visit of such a function after that time."""
        return next((each for each in self.visits if each.at_ns > after_ns and wanted(each.function)), None)

    def between(self, begin_ns: int, end_ns: int) -> Iterator[Visit]:
        """Those that were entered within."""
        return _within(self.visits, begin_ns, end_ns)


Processes = Mapping[str, Process]
"""By module."""


def _within(visits: Sequence[Visit], begin_ns: int, end_ns: int) -> Iterator[Visit]:
    first = bisect.bisect_left(visits, begin_ns, key=lambda visit: visit.at_ns)
    return takewhile(lambda visit: visit.at_ns < end_ns, islice(visits, first, None))


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
    ends_ns = _step_ends_ns(processes[decode])
    windows: list[set[Function]] = []
    for begin_ns, end_ns in spans_ns:
        own = [each for each in ends_ns if begin_ns < each < end_ns]
        for window in list(pairwise(own))[_EDGE:-_EDGE]:
            found = _out_window(processes, decode, *window)
            if found is not None:
                windows.append(found)
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


def _out_window(processes: Processes, decode: str, begin_ns: int, end_ns: int) -> set[Function] | None:
    """None if the loop came too late to hand anything over within, as it does on a busy machine."""
    functions = {
        visit.function
        for name, process in processes.items()
        if name != decode
        for visit in process.between(begin_ns, end_ns)
    }
    worker = processes[decode]
    calls = list(_within(worker.calls, begin_ns, end_ns))
    hand_overs = [each for each in calls if each.function.name in _HANDS_OVER]
    if not hand_overs:
        return None
    last = hand_overs[-1]
    outermost = next(each for each in calls if each.encloses(last.at_ns, last.thread))
    tasks = [each for each in calls if each.function == outermost.function and each.thread == last.thread]
    for visit in worker.between(begin_ns, end_ns):
        plans = visit.at_ns >= last.left_ns and any(each.encloses(visit.at_ns, last.thread) for each in tasks)
        if visit.thread == last.thread and not plans:
            functions.add(visit.function)
    return functions


def _is_engine(function: Function) -> bool:
    return function.kind is Kind.FUNCTION and function.name.startswith(_ENGINE)


def _step_ends_ns(process: Process) -> list[int]:
    found = sorted(each.left_ns for each in process.calls if each.function.name == _STEP_ENDS)
    if not found:
        raise WalkError(f"{_STEP_ENDS} did not run")
    return found


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
