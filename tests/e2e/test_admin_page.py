"""The admin page in a headless Chromium: what it shows is what the cluster says, live.

`make screenshot` (UPDATE_SCREENSHOT=1) lets the last test take the picture for docs/, which needs a minute of load.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc.aio
import pytest

from bench.support.cluster import Cluster, eventually, run_command, serve
from models.files.checkpoint import read_checkpoint
from tandem.client import AsyncClient, Client, ClusterStatus, WorkerStatus
from tandem.convert import info_to_proto, load_to_proto
from tandem.errors import InvalidRequest
from tandem.types import Incarnation, PoolCounts, Role, WorkerId, WorkerInfo, WorkerLoad
from tandem.v1 import registry_pb2, registry_pb2_grpc
from tests.browser import Page, browser_page
from tests.finished_command import finished

PICTURE = Path(__file__).parents[2] / "docs" / "images" / "admin-page.png"
TIMEOUT_S = 20.0
FRESH = "document.body.dataset.fresh === 'yes'"
SUMMARY = "document.getElementById('workers-summary').textContent"
HOSTILE = '<img src="x" onerror="document.title=1">&amp;</script>'

# How much text there is, and each whose contrast against what lies behind it is below WCAG's 4.5:1.
LOW_CONTRAST = """
(() => {
  const parse = (color) => color.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((c) => (c /= 255) <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const color = parse(getComputedStyle(node).backgroundColor);
      if (color.length < 4 || color[3] > 0) return color;
    }
  };
  const poor = [];
  let pieces = 0;
  for (const node of document.querySelectorAll("body *")) {
    const text = [...node.childNodes].filter((each) => each.nodeType === 3).map((each) => each.data.trim()).join("");
    if (!text || !node.checkVisibility()) continue;
    pieces += 1;
    const [a, b] = [light(parse(getComputedStyle(node).color)), light(behind(node))].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) poor.push(`${text}: ${((a + 0.05) / (b + 0.05)).toFixed(2)}`);
  }
  return [pieces, poor];
})()
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two workers of each kind with small pools, so that there is something to see in them."""
    with (
        serve("demo", "--prefill", "2", "--decode", "2", "--kv-blocks", "192") as running,
        Client(running.target) as client,
    ):
        # `ready` is said once one pair stands.
        assert eventually(
            lambda: [each.load.pool.total for each in client.status().workers if each.connected] == [192] * 4, 60
        )
        yield running


@pytest.fixture
def lone_router() -> Iterator[Cluster]:
    """A router without workers."""
    with run_command("router", "--model", "demo", "--listen", "127.0.0.1:0", "--drain-grace-seconds", "0") as running:
        yield running


def status_of(cluster: Cluster) -> ClusterStatus:
    with Client(cluster.target) as client:
        return client.status(timeout_s=TIMEOUT_S)


@contextlib.asynccontextmanager
async def page_of(address: str) -> AsyncIterator[Page]:
    """The page at an admin port, once it shows something; nothing may be complained of."""
    async with browser_page() as page:
        await page.open(f"http://{address}/")
        await page.until(FRESH)
        yield page
        assert page.complaints == []


@contextlib.asynccontextmanager
async def streams(target: str, count: int) -> AsyncIterator[None]:
    """So many long generations at a time, of ever new prompts."""
    draw = random.Random(7)

    async def keep_asking(client: AsyncClient) -> None:
        while True:
            prompt = [draw.randrange(5, 200) for _ in range(draw.randrange(100, 500))]
            await client.complete(token_ids=prompt, max_tokens=draw.randrange(150, 300), ignore_eos=True)

    async with AsyncClient(target) as client:
        tasks = [asyncio.create_task(keep_asking(client)) for _ in range(count)]
        try:
            yield
            assert not [task for task in tasks if task.done()]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def card(worker_id: str) -> str:
    """JavaScript for a worker's card."""
    return f"document.querySelector('[data-worker={worker_id}]')"


async def text_of(page: Page, worker_id: str, part: str) -> str:
    return str(await page.value(f"{card(worker_id)}.querySelector('.{part}').textContent"))


async def test_at_rest_every_figure_is_what_get_status_says(cluster: Cluster) -> None:
    status = status_of(cluster)
    async with page_of(status.admin_address) as page:
        assert await page.value("document.getElementById('verdict').textContent") == "ready"
        assert await page.value("document.querySelectorAll('.worker').length") == 4
        assert await page.value(SUMMARY) == "2 prefill, 2 decode · 0 live transfers"
        for worker in status.workers:
            name, load = worker.info.worker_id, worker.load
            assert await text_of(page, name, "role") == worker.info.role
            await page.until(f"{card(name)}.querySelector('.state').textContent === 'serving'")
            assert f"pid {worker.info.pid}" in await text_of(page, name, "about")
            assert f"of {load.pool.total} blocks of {load.pool.block_size} tokens" in await text_of(
                page, name, "pool-text"
            )
            for part, value in (("running", load.running_seqs), ("preemptions", load.preemptions)):
                assert await text_of(page, name, part) == str(value)


async def test_under_load_figures_and_bars_follow_and_come_to_rest_again(cluster: Cluster) -> None:
    async with page_of(status_of(cluster).admin_address) as page:
        async with streams(cluster.target, 4):
            await page.until("document.getElementById('active').textContent === '4'")
            four_run = await asyncio.to_thread(eventually, lambda: status_of(cluster).active_requests == 4)
            assert four_run  # and not at the first look: callers may be between two calls
            assert status_of(cluster).active_requests <= 4
            await page.until("parseFloat(document.getElementById('token-rate').textContent.replace(',', '')) > 10")
            await page.until("/^[\\d.]+ m?s$/.test(document.querySelector('#latency-inter_token .p99').textContent)")
            await page.until(
                "[...document.querySelectorAll('.pool [data-block=live]')].some((part) => part.clientWidth > 3)"
            )
            await page.until("document.querySelector('#active-spark path.first').getAttribute('d').includes('L')")
        await page.until("document.getElementById('active').textContent === '0'")
        await page.until("document.getElementById('token-rate').textContent === '0.0'")
        await page.until("[...document.querySelectorAll('.pool')].every((pool) => pool.ariaLabel.startsWith('0 live'))")
        ended = status_of(cluster)
        assert all(
            worker.load.pool.free + worker.load.pool.cached == worker.load.pool.total for worker in ended.workers
        )
        assert await counts_become_as_told(page, cluster)


async def counts_become_as_told(page: Page, cluster: Cluster) -> bool:
    """Looked at together: both forget what is a minute old."""
    for _ in range(100):
        told = status_of(cluster).recent.latencies
        counts = [f"document.querySelector('#latency-{each.name} .count').textContent" for each in told]
        shown = [await page.value(each) for each in counts]
        if shown == [f"of {each.count:,}" for each in told]:
            return True
        await asyncio.sleep(0.2)
    return False


async def test_lines_begin_before_the_page_was_opened_and_steps_are_right_at_once(cluster: Cluster) -> None:
    async with streams(cluster.target, 2):
        assert await asyncio.to_thread(
            eventually, lambda: all(each.load.steps_per_s > 5 for each in decoding(status_of(cluster)))
        )
        async with page_of(status_of(cluster).admin_address) as page:
            assert await page.value("past.series.active.length") >= 1
            assert "L" in await page.value("document.querySelector('#active-spark path.first').getAttribute('d')")
            for worker in decoding(status_of(cluster)):
                shown = float((await text_of(page, worker.info.worker_id, "steps")).replace(",", ""))
                assert 5 < shown < 2000


def decoding(status: ClusterStatus) -> list[WorkerStatus]:
    return [each for each in status.workers if each.info.role is Role.DECODE]


async def test_it_says_why_where_from_to_and_how_slow(cluster: Cluster) -> None:
    with Client(cluster.target) as client:
        for _ in range(2):
            client.complete("Once upon a time there was", max_tokens=2)
        with pytest.raises(InvalidRequest):
            client.complete("Once", max_tokens=2, temperature=-1.0)
        assert eventually(lambda: client.status().handoffs and client.status().recent.num_last > 1)
        status = client.status()
    assert "remote_static" in {each.reason for each in status.recent.last_placements}
    assert {each.reason for each in status.refusals} >= {"INVALID_FIELD"}
    (pair, *_) = status.handoffs
    assert pair.transport == "shm"
    async with page_of(status.admin_address) as page:
        recent = status.recent
        assert await page.value("document.getElementById('placements-summary').textContent") == (
            f"of the last {recent.num_last:,} requests, {recent.num_split:,} split between two workers"
        )
        assert f"{pair.count:,} · " in await page.value("document.querySelector('#handoffs tbody').textContent")
        slow = await page.value("document.querySelector('#slow tbody').textContent")
        assert all(each.trace_id in slow for each in status.slow_requests)
        choices = await page.value("[...document.querySelectorAll('#choices tbody tr')].map((row) => row.textContent)")
        assert any(
            "decode-0, decode-1, prefill-0, prefill-1kernels" in row and "--attention-backend" in row for row in choices
        )
        assert any("--kv-blocks says so" in row for row in choices)
        assert "refused: INVALID_FIELD" in await page.value("document.getElementById('failed-reasons').textContent")
        assert await page.value("document.getElementById('hit-rate').textContent.endsWith(' %')")


def test_explain_says_in_a_terminal_what_the_page_says(cluster: Cluster) -> None:
    told = finished("status", "--explain", "--target", cluster.target)
    assert (told.returncode, told.stderr) == (0, "")
    lines = told.stdout.splitlines()
    assert "decode-0, decode-1:" in lines
    (pool,) = {line for line in lines if line.startswith("  KV pool: 192 blocks")}
    assert pool.endswith("why: --kv-blocks says so; forced by: --kv-blocks")
    assert any(re.match(r"  prefill-\d to decode-\d: shm, \d+, median ", line) for line in lines)
    assert any(re.match(r"of the last \d+ requests \d+ were split", line) for line in lines)


async def test_a_workers_death_shows_and_so_does_its_successor(cluster: Cluster) -> None:
    status = status_of(cluster)
    (victim,) = [worker.info for worker in status.workers if worker.info.worker_id == "prefill-1"]
    async with page_of(status.admin_address) as page:
        cluster.process.send_signal(signal.SIGSTOP)  # else the successor might be there before the page looks
        try:
            os.kill(victim.pid, signal.SIGKILL)
            await page.until(f"{card('prefill-1')}.querySelector('.state').textContent === 'gone'")
            await page.until("document.getElementById('event-list').textContent.includes('prefill-1 is gone')")
        finally:
            cluster.process.send_signal(signal.SIGCONT)
        await page.until(f"{card('prefill-1')}.querySelector('.state').textContent === 'serving'", timeout_s=60)
        assert f"pid {victim.pid} " not in await text_of(page, "prefill-1", "about")
        assert "prefill-1 started anew" in await page.value("document.getElementById('event-list').textContent")


async def test_a_workers_own_page_shows_that_worker_alone(cluster: Cluster) -> None:
    (info,) = [each.info for each in status_of(cluster).workers if each.info.worker_id == "decode-1"]
    async with page_of(info.admin_address) as page:
        assert await page.value("document.getElementById('title').textContent") == "decode-1"
        assert await page.value("[...document.querySelectorAll('.worker')].map((each) => each.dataset.worker)") == [
            "decode-1"
        ]
        assert await page.value("document.getElementById('requests').hidden")
        assert await text_of(page, "decode-1", "state") == "serving"


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_all_text_can_be_read_in_light_and_dark_and_on_a_phone(cluster: Cluster, scheme: str) -> None:
    async with page_of(status_of(cluster).admin_address) as page:
        await page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        background = await page.value("getComputedStyle(document.body).backgroundColor")
        assert (background == "rgb(16, 22, 28)") == (scheme == "dark")
        pieces, poor = await page.value(LOW_CONTRAST)
        assert poor == []
        assert pieces > 50
        await page.call("Emulation.setDeviceMetricsOverride", width=360, height=740, deviceScaleFactor=1, mobile=False)
        assert await page.value("document.documentElement.scrollWidth") <= 360


async def test_what_is_missing_is_said_and_a_router_that_ends_makes_the_page_stale(lone_router: Cluster) -> None:
    address = status_of(lone_router).admin_address
    async with browser_page() as page:
        await page.open(f"http://{address}/")
        await page.until("document.getElementById('verdict').textContent === 'not ready'")
        assert "none is registered" in await page.value("document.getElementById('reason').textContent")
        assert not await page.value("document.getElementById('no-workers').hidden")
        assert page.complaints == []
        lone_router.stop()
        await page.until("document.getElementById('pulse').textContent.startsWith('stale for')")
        assert await page.value("document.body.dataset.fresh") == "no"
        with run_command("router", "--model", "demo", "--listen", "127.0.0.1:0", "--admin-listen", address):
            await page.until(FRESH, timeout_s=30)


async def test_a_name_from_elsewhere_is_text_and_nothing_else(lone_router: Cluster) -> None:
    checkpoint = read_checkpoint("demo")
    info = WorkerInfo(
        *(WorkerId(HOSTILE), Incarnation("1" * 32), Role.ELASTIC, "127.0.0.1:1", checkpoint.name),
        *(checkpoint.config_fingerprint, "m", "l", ("shm",), 0, 64, 1, HOSTILE, "javascript:alert(1)//"),
    )
    load = WorkerLoad(0, 0, 0, 0, PoolCounts(4, 4, 0, 0, 0, 0, 16, 0), 0, draining=False)
    async with (
        page_of(status_of(lone_router).admin_address) as page,  # first: the worker stays for one lease
        grpc.aio.insecure_channel(lone_router.target) as channel,
    ):
        register = registry_pb2_grpc.RegistryServiceStub(channel).Register()
        await register.write(registry_pb2.RegisterRequest(info=info_to_proto(info)))
        await register.write(registry_pb2.RegisterRequest(load=load_to_proto(load)))
        await page.until("document.querySelectorAll('.worker').length === 1")
        name = "document.querySelector('.worker .name')"
        assert await page.value(f"{name}.textContent") == HOSTILE
        assert await page.value(SUMMARY) == "1 elastic · 0 live transfers"
        assert await page.value(f"{name}.hasAttribute('href')") is False
        assert await page.value("document.querySelector('main img, main script')") is None
        register.cancel()


async def test_the_policy_keeps_scripts_out_that_are_not_the_pages_own(lone_router: Cluster) -> None:
    async with browser_page() as page:
        await page.open(f"http://{status_of(lone_router).admin_address}/")
        await page.until(FRESH)
        await page.value(
            "document.body.append(Object.assign(document.createElement('script'), {text: 'window.intruder = 1'}))"
        )
        assert await page.value("window.intruder === undefined")
        assert any("Content Security Policy" in complaint for complaint in page.complaints)


async def test_the_picture(cluster: Cluster, tmp_path: Path) -> None:
    wanted = bool(os.environ.get("UPDATE_SCREENSHOT"))
    async with page_of(status_of(cluster).admin_address) as page, streams(cluster.target, 9 if wanted else 4):
        await page.until("document.getElementById('active').textContent !== '0'")
        if wanted:
            await asyncio.sleep(62)  # quantiles are of a minute
            await page.until("[...document.querySelectorAll('[data-block=receiving].some')].length > 0", timeout_s=60)
        picture = await page.picture()
    (PICTURE if wanted else tmp_path / "page.png").write_bytes(picture)
    assert picture.startswith(b"\x89PNG")
