"""`tandem status --watch`: what it shows from moment to moment, and that it goes on."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest

from cli.main import main
from cli.pool_bar import ASCII, UNICODE, glyphs_for, pool_bar
from cli.screen import PlainScreen, open_screen
from cli.status_view import duration, render, span
from cli.watch import Watch
from cli.watch_view import Moment, Rates, fit, frame, rates_between
from tandem.client import ClusterStatus, RecentActivity, WorkerStatus
from tandem.clock import ManualClock
from tandem.errors import DeadlineExceeded, TandemError, Unauthenticated, Unavailable
from tandem.telemetry.recent_latencies import LatencySummary
from tandem.types import Incarnation, PoolCounts, Role, WorkerId, WorkerInfo, WorkerLoad

POOL = PoolCounts(total=100, free=50, reserved=10, receiving=15, live=24, quarantined=1, block_size=16, unused_slots=3)
INFO = WorkerInfo(
    *(WorkerId("decode-0"), Incarnation("life"), Role.DECODE, "127.0.0.1:9", "demo", "c", "m", "l", ("shm",)),
    *(0, 4096, 77, "cpu"),
)
WORKER = WorkerStatus(INFO, WorkerLoad(1000, 4, 5, 678, POOL, 2, draining=False, preemptions=9), 0.25, connected=True)
RECENT = RecentActivity(60.0, 2.0, 90.0, (LatencySummary("time_to_first_token", 7, 0.012, 0.5, 1.5),), 100, 5000)
STATUS = ClusterStatus("demo", True, "", 3, 400, 2, (WORKER,), "1.2.3", 50.0, "127.0.0.1:9464", RECENT)


def later(status: ClusterStatus, seconds: float, requests: int = 0, tokens: int = 0, steps: int = 0) -> ClusterStatus:
    """What the same router says afterwards."""
    recent = replace(
        status.recent,
        total_requests=status.recent.total_requests + requests,
        total_tokens=status.recent.total_tokens + tokens,
    )
    workers = tuple(
        replace(each, load=replace(each.load, engine_steps=each.load.engine_steps + steps)) for each in status.workers
    )
    return replace(status, uptime_s=status.uptime_s + seconds, recent=recent, workers=workers)


def shown(status: ClusterStatus | None = STATUS, width: int = 120, **moment: object) -> list[str]:
    parts = {"target": "h:1", "clock": "12:00:00", "status": status, "rates": Rates()} | moment
    return frame(Moment(**parts), width, UNICODE)  # type: ignore[arg-type]


# ---- pools


def test_a_bar_shares_its_width_as_the_pool_its_blocks() -> None:
    pool = PoolCounts(100, 50, 10, 15, 25, 0, 16, 0)
    assert pool_bar(pool, 20, UNICODE) == "█████▓▓▓▒▒··········"


def test_the_smallest_share_is_seen() -> None:
    assert pool_bar(replace(POOL, total=10_000, free=9_999, reserved=0, receiving=0, live=0), 10, ASCII) == "x........."


def test_a_full_pool_fills_the_bar_and_no_more() -> None:
    assert pool_bar(PoolCounts(3, 0, 1, 1, 1, 0, 16, 0), 10, ASCII) == "###+++---."  # thirds of ten, rounded
    assert len(pool_bar(PoolCounts(4, 0, 1, 1, 1, 1, 16, 0), 3, ASCII)) == 3


def test_a_pool_that_is_not_known_yet_is_an_empty_bar() -> None:
    assert pool_bar(PoolCounts(0, 0, 0, 0, 0, 0, 0, 0), 5, ASCII) == "....."


@pytest.mark.parametrize(("encoding", "glyphs"), [("utf-8", UNICODE), ("ascii", ASCII), (None, ASCII), ("odd", ASCII)])
def test_characters_are_those_that_the_output_can_carry(encoding: str | None, glyphs: object) -> None:
    assert glyphs_for(encoding) is glyphs


# ---- rates


def test_rates_are_what_happened_between_two_looks() -> None:
    rates = rates_between(STATUS, later(STATUS, 2.0, requests=5, tokens=300, steps=80))
    assert (rates.requests_per_s, rates.tokens_per_s, rates.steps_per_s) == (2.5, 150.0, {"life": 40.0})


def test_the_first_look_has_no_rates() -> None:
    assert rates_between(None, STATUS) == Rates()


def test_a_router_that_started_anew_has_no_past() -> None:
    anew = replace(STATUS, uptime_s=1.0, recent=replace(RECENT, total_requests=1))
    assert rates_between(STATUS, anew) == Rates()


def test_a_worker_that_started_anew_has_no_past() -> None:
    anew = replace(
        WORKER, info=replace(INFO, incarnation=Incarnation("next")), load=replace(WORKER.load, engine_steps=3)
    )
    assert rates_between(STATUS, replace(later(STATUS, 1.0), workers=(anew,))).steps_per_s == {}


# ---- frames


def test_a_frame_says_what_the_status_says() -> None:
    lines = shown(rates=Rates(2.5, 150.0, {INFO.incarnation: 40.0}))
    assert lines[0].split() == ["tandem", "h:1", "12:00:00"]
    assert lines[1].startswith("model demo, ready")
    assert lines[1].endswith("version 1.2.3, up 50 s")
    assert lines[2] == "2 active, 3 queued (400 prompt tokens), 2.5 requests/s, 150 tokens/s"
    assert any(line.split() == "time to first token 12 ms 500 ms 1.5 s 7".split() for line in lines)
    row = next(line for line in lines if line.startswith("decode-0")).split()
    assert row[1:13] == ["serving", "0.2", "s", "4", "5", "678", "2", "9", "40.0", "50", "%", row[12]]
    assert set(row[12]) == set("█▓▒×·")


@pytest.mark.parametrize("width", [20, 40, 79, 80, 100, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    assert max(map(len, shown(width=width))) <= width


def test_where_there_is_no_room_for_bars_there_are_none() -> None:
    assert "pool" not in "\n".join(shown(width=80))
    assert "pool" in "\n".join(shown(width=100))


def test_prefill_workers_come_first() -> None:
    prefill = replace(WORKER, info=replace(INFO, role=Role.PREFILL, worker_id=WorkerId("prefill-0")))
    names = [line.split()[0] for line in shown(replace(STATUS, workers=(WORKER, prefill))) if "serving" in line]
    assert names == ["prefill-0", "decode-0"]


def test_a_frame_that_is_too_high_says_how_much_is_missing() -> None:
    assert fit(["a", "b", "c", "d"], 3) == ["a", "b", "(2 more lines)"]
    assert fit(["a", "b", "c"], 3) == ["a", "b", "c"]


def test_names_from_elsewhere_cannot_command_the_terminal() -> None:
    hostile = replace(WORKER, info=replace(INFO, worker_id=WorkerId("\x1b[2Jboo")))
    status = replace(STATUS, ready=False, not_ready_reason="\x1b]0;boo\x07", workers=(hostile,))
    text = "\n".join(shown(status, silent_s=1.0, trouble="\x1b[31m")) + render(status)
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "boo" in text


def test_the_plain_status_tells_latencies_rates_and_where_the_page_is() -> None:
    text = render(STATUS)
    assert "since start: 100 requests, 5000 tokens; over the last 60 s: 2 requests/s, 90 tokens/s" in text
    assert "version 1.2.3, up 50 s, page at 127.0.0.1:9464" in text
    assert "time to first token  12 ms  500 ms  1.5 s" in text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.00123, "1.23 ms"), (0.5, "500 ms"), (12.345, "12.3 s"), (99.0, "99 s")]
)
def test_durations_have_the_unit_that_fits(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(5.9, "5 s"), (65, "1 min 5 s"), (3_720, "1 h 2 min"), (90_000, "1 d 1 h")]
)
def test_stretches_of_time_have_two_units(seconds: float, text: str) -> None:
    assert span(seconds) == text


# ---- the loop


class Router:
    """Answers from a script: a status, or an error to be raised."""

    def __init__(self, *answers: ClusterStatus | TandemError) -> None:
        self.answers = list(answers)

    def ask(self) -> ClusterStatus:
        answer = self.answers.pop(0)
        if isinstance(answer, TandemError):
            raise answer
        return answer


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def frames(clock: ManualClock, *answers: ClusterStatus | TandemError, every_s: float = 10.0) -> list[str]:
    """What is shown at each look."""
    watch = Watch("h:1", Router(*answers).ask, clock, UNICODE)
    seen: list[str] = []
    for _ in answers:
        clock.advance_s(every_s)
        watch.look()
        out = io.StringIO()
        watch.show(PlainScreen(out), "12:00:00")
        seen.append(out.getvalue())
    return seen


@pytest.mark.parametrize("failure", [Unavailable("connection refused"), DeadlineExceeded("too late")])
def test_a_router_that_is_gone_is_told_with_what_was_known_and_forgotten_when_it_is_back(
    clock: ManualClock, failure: TandemError
) -> None:
    well, gone, longer, back = frames(clock, STATUS, failure, failure, replace(STATUS, uptime_s=1.0))
    assert "unreachable" not in well
    assert f"unreachable for 10 s: {failure.message}" in gone
    assert "unreachable for 20 s" in longer
    assert "decode-0" in longer
    assert "unreachable" not in back
    assert "- requests/s" in back


def test_a_router_that_was_never_there_is_waited_for(clock: ManualClock) -> None:
    nobody, there = frames(clock, Unavailable("connection refused"), STATUS)
    assert "unreachable for 10 s: connection refused" in nobody
    assert "model demo, ready" in there


def test_what_waiting_does_not_mend_ends_it(clock: ManualClock) -> None:
    with pytest.raises(Unauthenticated):
        frames(clock, Unauthenticated("a token is needed"))


def test_rates_appear_with_the_second_look(clock: ManualClock) -> None:
    first, second = frames(clock, STATUS, later(STATUS, 10.0, tokens=500))
    assert "- tokens/s" in first
    assert "50.0 tokens/s" in second


class Terminal(io.StringIO):
    """An output that says it is one."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_is_drawn_over_in_place_and_gets_back_what_it_showed() -> None:
    out = Terminal()

    def interrupted() -> None:
        with open_screen(out) as screen:
            screen.show(["one", "two"])
            screen.show(["three"])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    written = out.getvalue()
    assert written.startswith("\x1b[?1049h")
    assert written.endswith("\x1b[?1049l")
    assert "\x1b[Hone\x1b[K\r\ntwo\x1b[K\x1b[J\x1b[Hthree\x1b[K\x1b[J" in written


def test_anything_else_gets_one_frame_after_the_other() -> None:
    out = io.StringIO()
    with open_screen(out) as screen:
        screen.show(["one", "two"])
        screen.show(["three"])
    assert out.getvalue() == "one\ntwo\n\nthree\n\n"


@pytest.mark.parametrize("given", ["0", "never", "-1", "nan", "1e9"])
def test_a_bad_interval_is_exit_code_two_and_named(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", f"--watch={given}"]) == 2
    assert "--watch" in capsys.readouterr().err
