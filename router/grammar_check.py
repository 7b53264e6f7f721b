"""Whether a constraint can be used, found out in a process of its own, which may be ended.

A grammar can be made to take minutes, gigabytes or the whole stack to compile, and a compile cannot be interrupted. So
each is first compiled where it can harm nobody, with bounds on processor time and memory; what passes,
every worker can compile in no more. One at a time, small ones first. The process starts with the first one and stays;
answers are remembered.
"""

from __future__ import annotations

import json
import os
import resource
import select
import subprocess
import sys
from collections import OrderedDict
from functools import partial
from pathlib import Path

from models.files.checkpoint import read_checkpoint
from models.grammar import GrammarCompiler
from router.lane import Lane
from shell.module_command import module_command
from tandem.errors import InternalError, InvalidRequest
from tandem.types import Constraint, Language

MAX_CPU_S = 2
"""Most processor time of a compile."""
MAX_WALL_S = 20.0
"""Until an answer, if the machine is that busy; the process's own start included."""
MAX_BYTES = 512 * 1024 * 1024
"""Most memory of the process, beside the tokenizer."""
_MAX_KNOWN = 256
_NICE = 5
"""Niceness of the process, so that running requests go first."""


class GrammarCheck:
    """Grammar check of a model. Owns its thread and its process."""

    def __init__(self, checkpoint: Path) -> None:
        """`checkpoint`: its folder."""
        self._checkpoint = checkpoint
        self._lane = Lane("grammar-check")
        self._process: subprocess.Popen[bytes] | None = None
        """Used in the lane alone."""
        self._known: OrderedDict[Constraint, str] = OrderedDict()
        """What is wrong with each; empty = nothing."""

    async def check(self, constraint: Constraint) -> None:
        """Raises InvalidRequest that names the field."""
        if constraint not in self._known:
            problem = await self._lane.run(_size(constraint), partial(self._ask, constraint))
            if problem is None:  # not remembered: that may have been the machine's doing
                raise InvalidRequest(f"sampling.{constraint.language}", "takes too much time or memory to compile")
            self._known[constraint] = problem
            if len(self._known) > _MAX_KNOWN:
                self._known.popitem(last=False)
        self._known.move_to_end(constraint)
        if problem := self._known[constraint]:
            raise InvalidRequest(f"sampling.{constraint.language}", problem)

    def close(self) -> None:
        """Ends thread and process."""
        self._lane.close()
        if self._process is not None:
            _end(self._process)

    def _ask(self, constraint: Constraint) -> str | None:
        """In the thread: what is wrong with it, empty if nothing is; None if it took too much."""
        process = self._process
        if process is None or process.poll() is not None:
            if process is not None:
                _end(process)
            process = self._process = _start(self._checkpoint)
        answer = _answer(process, json.dumps([constraint.language, *constraint.texts]).encode() + b"\n")
        if not answer:
            _end(process)
            return None
        problem: str = json.loads(answer)
        return problem


def _size(constraint: Constraint) -> int:
    return sum(map(len, constraint.texts))


def _start(checkpoint: Path) -> subprocess.Popen[bytes]:
    command = module_command("router.grammar_check", str(checkpoint))
    # Its standard error is lost on purpose: where it breaks, it may say what the caller wrote.
    pipe = subprocess.PIPE
    return subprocess.Popen(command, bufsize=0, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)


def _end(process: subprocess.Popen[bytes]) -> None:
    with process:  # closes the pipes, and waits
        process.kill()


def _answer(process: subprocess.Popen[bytes], question: bytes) -> bytes:
    """Returns the answer's line; empty if the process died or took too long."""
    if process.stdin is None or process.stdout is None:
        raise InternalError("a process without pipes")
    try:
        process.stdin.write(question)
    except BrokenPipeError:
        return b""
    answers = select.poll()  # `select` takes no descriptor above 1023
    answers.register(process.stdout, select.POLLIN)
    return process.stdout.readline() if answers.poll(MAX_WALL_S * 1e3) else b""


def main() -> None:
    """The process: a constraint in, a line; what is wrong with it out, a line; until its input ends."""
    os.nice(_NICE)
    checkpoint = read_checkpoint(sys.argv[1])
    compiler = GrammarCompiler.of(checkpoint)
    compiler.tokenizer()
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_AS, _mapped_bytes() + MAX_BYTES)
    for line in sys.stdin.buffer:
        used = resource.getrusage(resource.RUSAGE_SELF)
        _limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + 1 + MAX_CPU_S)
        language, *texts = json.loads(line)
        problem = ""
        try:
            compiler.compile(Constraint(Language(language), tuple(texts)))
        except InvalidRequest as error:
            problem = error.message.removeprefix(f"{error.field}: ")
        print(json.dumps(problem), flush=True)


def _limit(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (value, hard))


def _mapped_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    main()
