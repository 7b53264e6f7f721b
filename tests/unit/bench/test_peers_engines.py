from dataclasses import dataclass, field

from bench.peers.contenders import CONTENDERS
from bench.peers.engines import JobEngine, Results, Workload, run_round
from bench.peers.job import Job, JobTimes
from bench.peers.process import PeerError

SHORT = Workload(2, 8, 3)
LONG = Workload(1, 64, 2, compares_prefill=True, left_out=frozenset({"transformers"}))


@dataclass
class FakeEngine:
    """Notes its jobs in a list that engines share; dies at its `dies_at`-th."""

    name: str
    log: list[tuple[str, Job]]
    dies_at: int | None = None
    jobs: list[Job] = field(default_factory=list)

    def run(self, job: Job) -> JobTimes:
        self.jobs.append(job)
        if len(self.jobs) == self.dies_at:
            raise PeerError("died")
        self.log.append((self.name, job))
        return JobTimes(1.0, [0.1] * job.decode_steps, [len(self.name)] * job.num_seqs)


def ran(*workloads: Workload, dies_at: int | None = None, rounds: int = 1) -> tuple[list[tuple[str, Job]], Results]:
    log: list[tuple[str, Job]] = []
    engines = [FakeEngine("tandem", log), FakeEngine("vllm", log, dies_at), FakeEngine("transformers", log)]
    results: Results = {}

    def lose(engine: JobEngine, error: PeerError) -> None:
        engines[:] = [each for each in engines if each is not engine]

    for number in range(rounds):
        run_round(engines, workloads, number, results, lose)
    return log, results


def test_engines_take_turns_at_beginning() -> None:
    log, _ = ran(SHORT, rounds=3)
    assert [name for name, _ in log][::3] == ["tandem", "vllm", "transformers"]


def test_all_engines_decode_the_same_prompts_in_a_round_and_others_in_the_next() -> None:
    log, _ = ran(SHORT, rounds=2)
    prompts = [job.prompts(100) for _, job in log]
    assert prompts[0] == prompts[1] == prompts[2] != prompts[3]


def test_every_budget_is_tried_with_prompts_of_its_own_but_decode_only_once() -> None:
    log, results = ran(LONG)
    ours = [job for name, job in log if name == "tandem"]
    assert [job.budget_tokens for job in ours] == list(CONTENDERS["tandem"].budgets)
    assert [job.decode_steps for job in ours] == [0, 2]
    assert ours[0].prompts(100) != ours[1].prompts(100)
    assert len(results[LONG.name]["tandem"].step_s) == 2


def test_an_engine_that_dies_is_left_out_and_the_others_go_on() -> None:
    log, results = ran(SHORT, dies_at=2, rounds=3)
    names = [name for name, _ in log]
    assert (names.count("tandem"), names.count("vllm"), names.count("transformers")) == (3, 1, 3)
    assert len(results[SHORT.name]["vllm"].step_s) == 3
