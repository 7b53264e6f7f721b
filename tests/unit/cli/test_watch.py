"""`tandem status --watch`: what it shows from moment to moment, and that it goes on."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import replace
from typing import TextIO

import pytest
from rich.console import Console, ConsoleRenderable

from cli.main import main
from cli.status import Frame, Watch, frames_on
from cli.status_view import Legend, PoolBar, duration, span, view
from cli.terminal import open_console, plain, print_whole
from tandem.client import ClusterStatus, RecentActivity, WorkerStatus
from tandem.cluster_status import LatencySummary
from tandem.errors import DeadlineExceeded, TandemError, Unauthenticated, Unavailable
from tandem.types import Incarnation, PoolCounts, Role, WorkerId, WorkerInfo, WorkerLoad
from tests.manual_clock import ManualClock

POOL = PoolCounts(total=100, free=50, reserved=10, receiving=15, live=24, quarantined=1, block_size=16, unused_slots=3)
INFO = WorkerInfo(
    *(WorkerId("decode-0"), Incarnation("life"), Role.DECODE, "127.0.0.1:9", "demo", "c", "m", "l", ("shm",)),
    *(0, 4096, 77, "cpu"),
)
WORKER = WorkerStatus(INFO, WorkerLoad(1000, 4, 5, 678, POOL, 2, draining=False, preemptions=9), 0.25, connected=True)
RECENT = RecentActivity(60.0, 2.0, 90.0, (LatencySummary("time_to_first_token", 7, 0.012, 0.5, 1.5),), 100, 5000)
STATUS = ClusterStatus("demo", True, "", 3, 400, 2, (WORKER,), "1.2.3", 50.0, "127.0.0.1:9464", RECENT)


class Router:
    """Answers from a script: a status, or an error to be raised."""

    def __init__(self, *answers: ClusterStatus | TandemError) -> None:
        self.answers = list(answers)

    def ask(self) -> ClusterStatus:
        answer = self.answers.pop(0)
        if isinstance(answer, TandemError):
            raise answer
        return answer


class Terminal(io.TextIOWrapper):
    """An output that says it is one, of the given encoding."""

    def __init__(self, encoding: str = "utf-8") -> None:
        self.bytes = io.BytesIO()
        super().__init__(self.bytes, encoding=encoding)

    def isatty(self) -> bool:
        return True

    @property
    def written(self) -> str:
        self.flush()
        return self.bytes.getvalue().decode(self.encoding)


def drawn(part: ConsoleRenderable, width: int = 120, height: int | None = None, encoding: str = "utf-8") -> list[str]:
    """Lines of plain characters, as a terminal of this size shows them."""
    out = Terminal(encoding)
    console = Console(file=out, width=width, color_system=None, markup=False, highlight=False)
    if height is not None:
        console.print(part, height=height, end="")
    else:
        console.print(part, end="")
    return [line.rstrip() for line in out.written.splitlines()]


def shown(*answers: ClusterStatus | TandemError, width: int = 120) -> list[str]:
    """The frame after the last of the answers, 2 s apart."""
    clock = ManualClock()
    watch = Watch("h:1", Router(*answers).ask, clock)
    for _ in answers:
        clock.advance_s(2.0)
        watch.look()
    return drawn(watch.frame("12:00:00"), width)


# ---- pools


def bar(pool: PoolCounts, width: int, encoding: str = "utf-8") -> str:
    (line,) = drawn(PoolBar(pool), width, encoding=encoding)
    return line


def test_a_bar_shares_its_width_as_the_pool_its_blocks() -> None:
    pool = PoolCounts(100, 50, 10, 15, 25, 0, 16, 0)
    assert bar(pool, 20) == "█████▓▓▓▒▒··········"


def test_cached_blocks_are_seen_and_are_not_in_use() -> None:
    pool = PoolCounts(100, 40, 0, 0, 20, 0, 16, 0, cached=40)
    assert bar(pool, 10, "ascii") == "##::::...."
    worker = replace(STATUS.workers[0], load=replace(STATUS.workers[0].load, pool=pool))
    assert any(" 20 %" in line for line in shown(replace(STATUS, workers=(worker,))))


def test_the_smallest_share_is_seen() -> None:
    pool = replace(POOL, total=10_000, free=9_999, reserved=0, receiving=0, live=0)
    assert bar(pool, 10, "ascii") == "x........."


def test_a_full_pool_fills_the_bar_and_no_more() -> None:
    assert bar(PoolCounts(3, 0, 1, 1, 1, 0, 16, 0), 10, "ascii") == "###+++---."  # thirds of ten, rounded
    assert len(bar(PoolCounts(4, 0, 1, 1, 1, 1, 16, 0), 3)) == 3


def test_a_pool_that_is_not_known_yet_is_an_empty_bar() -> None:
    assert bar(PoolCounts(0, 0, 0, 0, 0, 0, 0, 0), 5, "ascii") == "....."


@pytest.mark.parametrize(
    ("encoding", "legend"),
    [
        ("utf-8", "█ live  ▓ receiving  ▒ reserved  × quarantined  ░ cached  · free"),
        ("ascii", "# live  + receiving  - reserved  x quarantined  : cached  . free"),
    ],
)
def test_the_legend_has_characters_that_the_output_can_carry(encoding: str, legend: str) -> None:
    assert drawn(Legend(), encoding=encoding) == [legend]


# ---- frames


def test_a_frame_says_what_the_status_says() -> None:
    lines = shown(STATUS)
    assert lines[0].split() == ["tandem", "h:1", "12:00:00"]
    assert lines[1] == "model demo, ready"
    assert lines[2] == "requests: 2 active, 3 queued (400 prompt tokens)"
    assert lines[3].endswith("over the last 60 s: 2 requests/s, 90 tokens/s")
    assert lines[4] == "router: version 1.2.3, up 50 s, page at 127.0.0.1:9464"
    assert any(line.split() == "time to first token 12 ms 500 ms 1.5 s 7".split() for line in lines)
    row = next(line for line in lines if line.startswith("decode-0")).split()
    assert row[1:10] == ["serving", "0.2", "s", "ago", "4", "5", "2", "50", "%"]
    assert set(row[10]) == set("█▓▒×·")


def test_in_80_columns_nothing_of_a_worker_is_cut_off() -> None:
    (row,) = (line for line in shown(STATUS, width=80) if line.startswith("decode-0"))
    assert row.split()[:10] == ["decode-0", "serving", "0.2", "s", "ago", "4", "5", "2", "50", "%"]
    assert len(row.split()[10]) >= 8


@pytest.mark.parametrize("width", [20, 40, 79, 80, 100, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    assert max(map(len, shown(STATUS, width=width))) <= width


def test_a_frame_that_is_too_high_says_how_much_is_missing() -> None:
    four = Frame([plain(each) for each in "abcd"])
    assert drawn(four, height=3) == ["a", "b", "(2 more lines)"]
    assert drawn(four, height=4) == ["a", "b", "c", "d"]


HOSTILE = replace(
    STATUS,
    ready=False,
    not_ready_reason="\x1b]0;boo\x07",
    admin_address="\x9b2J\u202e",
    workers=(replace(WORKER, info=replace(INFO, worker_id=WorkerId("[red]\x1b[2J"), device="[link=http://evil]")),),
)


@pytest.mark.parametrize("out", [io.StringIO, Terminal])
def test_names_from_elsewhere_cannot_command_the_terminal(out: Callable[[], TextIO]) -> None:
    target = out()
    console = open_console(target)
    console.no_color = True
    watch = Watch("h:1", Router(HOSTILE, Unavailable("\x1b[31m\r")).ask, ManualClock())
    watch.look()
    watch.look()
    print_whole(console, *view(HOSTILE), watch.frame("12:00:00"))
    text = target.written if isinstance(target, Terminal) else target.getvalue()  # type: ignore[attr-defined]
    without_styles = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert all(each.isprintable() or each == "\n" for each in without_styles)
    assert "boo" in text
    assert "[red]" in text
    assert "[link=http://evil]" in text
    assert "\x1b[31m" not in text


def whole(status: ClusterStatus) -> str:
    """What `tandem status` prints into a pipe."""
    out = io.StringIO()
    print_whole(open_console(out), *view(status))
    return out.getvalue()


def test_a_worker_is_one_line_however_narrow_the_terminal_and_long_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    named = replace(WORKER, info=replace(INFO, worker_id=WorkerId("w" * 64)))
    out = Terminal()
    print_whole(open_console(out), *view(replace(STATUS, workers=(named,))))
    for text in (out.written, whole(replace(STATUS, workers=(named,)))):
        assert sum("w" * 64 in line for line in text.splitlines()) == 3
        assert "127.0.0.1:9  " in text


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


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def frames(clock: ManualClock, *answers: ClusterStatus | TandemError, every_s: float = 10.0) -> list[str]:
    """What is shown at each look."""
    watch = Watch("h:1", Router(*answers).ask, clock)
    seen: list[str] = []
    for _ in answers:
        clock.advance_s(every_s)
        watch.look()
        seen.append("\n".join(drawn(watch.frame("12:00:00"))))
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


def test_a_router_that_was_never_there_is_waited_for(clock: ManualClock) -> None:
    nobody, there = frames(clock, Unavailable("connection refused"), STATUS)
    assert "unreachable for 10 s: connection refused" in nobody
    assert "model demo, ready" in there


def test_what_waiting_does_not_mend_ends_it(clock: ManualClock) -> None:
    with pytest.raises(Unauthenticated):
        frames(clock, Unauthenticated("a token is needed"))


def test_a_terminal_is_drawn_over_in_place_and_gets_back_what_it_showed() -> None:
    out = Terminal()

    def interrupted() -> None:
        with frames_on(open_console(out)) as show:
            show(Frame([plain("one"), plain("two")]))
            show(Frame([plain("three")]))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    written = out.written
    assert written.startswith("\x1b[?1049h")
    assert written.endswith("\x1b[?1049l")
    first, second = written.split("\x1b[H")[-2:]
    assert first.split()[:2] == ["one", "two"]
    assert second.split()[0] == "three"
    assert "two" not in second


def test_anything_else_gets_one_frame_after_the_other() -> None:
    out = io.StringIO()
    with frames_on(open_console(out)) as show:
        show(Frame([plain("one"), plain("two")]))
        show(Frame([plain("three")]))
    assert out.getvalue() == "one\ntwo\n\nthree\n\n"


@pytest.mark.parametrize("given", ["0", "never", "-1", "nan", "1e9"])
def test_a_bad_interval_is_exit_code_two_and_named(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", f"--watch={given}"]) == 2
    assert "--watch" in capsys.readouterr().err
