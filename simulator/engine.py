"""An engine that computes nothing and takes as long as its cost model says: a `worker.ports.StepEngine`."""

from __future__ import annotations

import asyncio

from engine.step import SampledToken, Step, StepResult
from simulator.costs import StepCosts, StepWork
from tandem.types import TokenId

OUTPUT_TOKEN = TokenId(0)
"""What every draw brings."""
_TOKEN = (SampledToken(OUTPUT_TOKEN, None),)


class SimulatedEngine:
    """Steps run one after the other, in order of launch."""

    def __init__(self, costs: StepCosts) -> None:
        self.num_steps = 0
        self.busy_s = 0.0
        """Time in steps."""
        self.prompt_s = 0.0
        """Of that, what their prompt tokens added."""
        self._costs = costs
        self._free_s = 0.0

    def launch(self, step: Step) -> asyncio.Future[StepResult]:
        """See `StepEngine`."""
        loop = asyncio.get_running_loop()
        work = StepWork.of(step.seqs)
        seconds = self._costs.seconds(work)
        self.busy_s += seconds
        if work.prompt_tokens:
            alone = StepWork(work.decodes, work.context_tokens, 0, 0)
            self.prompt_s += seconds - (self._costs.seconds(alone) if work.decodes else 0.0)
        self._free_s = max(loop.time(), self._free_s) + seconds
        future: asyncio.Future[StepResult] = loop.create_future()
        outputs = tuple([(_TOKEN,) * len(seq.samples) for seq in step.seqs])
        loop.call_at(self._free_s, self._end, future, StepResult(outputs, seconds))
        return future

    def _end(self, future: asyncio.Future[StepResult], result: StepResult) -> None:
        self.num_steps += 1
        if not future.done():
            future.set_result(result)
