"""An engine that computes nothing and takes as long as its cost model says: a `worker.ports.StepEngine`.

Engines of one host share its memory and caches: while others compute too, all of them are slower by measured factors.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from dataclasses import dataclass, field, replace
from random import Random

from engine.step import DrawnTokens, SampledToken, Step, StepResult
from simulator.costs import Sharing, StepCosts, StepWork
from tandem.types import TokenId

OUTPUT_TOKEN = TokenId(0)
"""What every draw brings."""
_TOKEN = (SampledToken(OUTPUT_TOKEN, None),)


@dataclass(slots=True, eq=False)
class _Run:
    """A step that was launched and has not ended."""

    engine: SimulatedEngine
    result: StepResult
    """But for its seconds."""
    decode_s: float
    prompt_s: float
    """Both alone on the host."""
    left_s: float
    """Alone on the host."""
    future: asyncio.Future[StepResult] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    began_s: float = 0.0
    timer: asyncio.TimerHandle | None = None


class Host:
    """Engines that compute at a time on one machine."""

    def __init__(self, sharing: Sharing) -> None:
        self._sharing = sharing
        self._running: list[_Run] = []
        self._at_s = 0.0
        """Time up to which the remaining work of all runs was counted."""

    def begin(self, run: _Run) -> None:
        """Adds a run, which computes from now on."""
        run.began_s = self._advance()
        self._running.append(run)
        self._schedule()

    def _advance(self) -> float:
        """Counts what was computed since; returns the time."""
        now_s = asyncio.get_running_loop().time()
        for run in self._running:
            run.left_s -= (now_s - self._at_s) / self._slowdown(run)
        self._at_s = now_s
        return now_s

    def _schedule(self) -> None:
        loop = asyncio.get_running_loop()
        for run in self._running:
            if run.timer is not None:
                run.timer.cancel()
            run.timer = loop.call_at(self._at_s + max(0.0, run.left_s) * self._slowdown(run), self._end, run)

    def _end(self, run: _Run) -> None:
        now_s = self._advance()
        self._running.remove(run)
        self._schedule()
        run.engine.ended(run, now_s - run.began_s)

    def _slowdown(self, run: _Run) -> float:
        alone_s = run.decode_s + run.prompt_s
        if len(self._running) == 1 or not alone_s:
            return 1.0
        beside_s = run.decode_s * self._sharing.decode + run.prompt_s * self._sharing.prompt
        return 1.0 + (beside_s / alone_s - 1.0) * (len(self._running) - 1)


class SimulatedEngine:
    """An engine that runs steps one after the other, in order of launch."""

    def __init__(self, costs: StepCosts, host: Host, rng: Random, jitter: float = 0.0) -> None:
        """`jitter` is `CostModel.jitter`."""
        self.num_steps = 0
        self.is_asynchronous = False
        self.busy_s = 0.0
        """Time in steps."""
        self.prompt_s = 0.0
        """Seconds that prompt tokens added to the steps."""
        self._costs = costs
        self._host = host
        self._rng = rng
        self._jitter = jitter
        self._launched: deque[_Run] = deque()

    def launch(self, step: Step) -> asyncio.Future[StepResult]:
        """See `StepEngine`."""
        work = StepWork.of(step)
        differs_s = math.expm1(self._rng.gauss(0.0, self._jitter)) * self._costs.base if self._jitter else 0.0
        seconds = self._costs.seconds(work) + differs_s
        decodes = StepWork(work.decodes, work.context_tokens, 0, 0)
        decode_s = self._costs.seconds(decodes) + differs_s if work.decodes else 0.0
        outputs = tuple([(_TOKEN,) * len(chunk.samples) for chunk in step.chunks])
        drawn = DrawnTokens((OUTPUT_TOKEN,) * (0 if step.rows is None else len(step.rows)))
        run = _Run(self, StepResult(outputs, 0.0, drawn=drawn), decode_s, seconds - decode_s, seconds)
        self._launched.append(run)
        if len(self._launched) == 1:
            self._host.begin(run)
        return run.future

    def ended(self, run: _Run, seconds: float) -> None:
        """The host says that the first of the launched steps has."""
        self._launched.popleft()
        self.num_steps += 1
        self.busy_s += seconds
        self.prompt_s += seconds * run.prompt_s / max(run.decode_s + run.prompt_s, 1e-12)
        if self._launched:
            self._host.begin(self._launched[0])
        if not run.future.done():
            run.future.set_result(replace(run.result, seconds=seconds))
