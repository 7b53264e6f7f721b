"""Which request to the admin port gets which answer."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from shell.admin.content import AdminContent, RouterReport, ScrapeTarget, WorkerReport
from shell.admin.site import HEADERS, Site
from shell.rpc.health import HealthServicer
from tandem.cluster_status import ClusterStatus
from tandem.security.tokens import Tokens
from tests.pki import OTHER_TOKEN, TOKEN, Pki
from tests.registering import IDLE, INFO

CLUSTER = ClusterStatus("demo", True, "", 1, 2, 3, ())
TARGETS = (ScrapeTarget("h:1", "router"), ScrapeTarget("h:2", "decode", "decode-0"), ScrapeTarget("", "prefill", "p"))
Get = Callable[..., web.Response]


def body_of(answer: web.Response) -> bytes:
    assert isinstance(answer.body, bytes)
    return answer.body


@pytest.fixture
def content() -> AdminContent:
    """A router's."""
    return AdminContent(
        health=HealthServicer([]),
        report=lambda: RouterReport(cluster=CLUSTER),
        history=lambda: {"series": {"active": [1]}},
        metrics=lambda _: (b"up 1\n", "text/plain; version=0.0.4"),
        targets=lambda: TARGETS,
    )


def site_of(content: AdminContent, listen: str = "127.0.0.1:9", tokens: Tokens | None = None) -> Get:
    site = Site(content, listen, tokens)

    def get(
        path: str,
        method: str = "GET",
        host: str | None = "localhost:9",
        authorization: str | None = None,
        accept: str | None = None,
    ) -> web.Response:
        headers = {"Host": host, "Authorization": authorization, "Accept": accept}
        shown = {name: value for name, value in headers.items() if value is not None}
        return site.answer(make_mocked_request(method, path, shown))

    return get


@pytest.fixture
def get(content: AdminContent) -> Get:
    """Asks a router's site on loopback, without tokens."""
    return site_of(content)


def test_the_status_is_what_the_router_reports(get: Get) -> None:
    answer = get("/status.json")
    assert (answer.status, answer.headers["Content-Type"]) == (200, "application/json")
    told = json.loads(body_of(answer))
    assert told["process"] == "router"
    assert told["cluster"] | {"model": "demo", "active_requests": 3} == told["cluster"]


def test_a_worker_reports_itself(content: AdminContent) -> None:
    load = replace(IDLE, pool=replace(IDLE.pool, live=1))
    report = WorkerReport(process=INFO.role, version="1", uptime_s=2.0, ready=True, info=INFO, load=load)
    get = site_of(replace(content, report=lambda: report, targets=None))

    told = json.loads(body_of(get("/status.json")))

    assert (told["process"], told["info"]["worker_id"], told["load"]["pool"]["live"]) == ("decode", "decode-0", 1)
    assert get("/targets").status == 404


def test_metrics_come_as_the_scraper_asks(content: AdminContent) -> None:
    get = site_of(replace(content, metrics=lambda accept: (accept.encode(), "text/plain")))
    assert [body_of(get("/metrics", accept=accept)) for accept in ("text/plain", None)] == [b"text/plain", b""]


def test_metrics_are_passed_on_with_their_type(get: Get) -> None:
    answer = get("/metrics")
    assert (answer.status, answer.headers["Content-Type"]) == (200, "text/plain; version=0.0.4")
    assert body_of(answer) == b"up 1\n"


def test_targets_are_what_prometheus_expects_without_those_that_have_no_port(get: Get) -> None:
    assert json.loads(body_of(get("/targets"))) == [
        {"targets": ["h:1"], "labels": {"role": "router"}},
        {"targets": ["h:2"], "labels": {"role": "decode", "worker_id": "decode-0"}},
    ]


@pytest.mark.parametrize("path", ["/", "/style.css", "/page.js", "/tables.js", "/icon.svg"])
def test_the_page_and_all_that_it_names_are_here(get: Get, path: str) -> None:
    assert get(path).status == 200
    assert get(path).body


def test_the_page_names_nothing_from_elsewhere(get: Get) -> None:
    for path in ("/", "/style.css", "/page.js", "/tables.js", "/icon.svg"):
        text = body_of(get(path)).decode().replace("http://www.w3.org/2000/svg", "")  # a name, nothing is fetched
        assert "http:" not in text
        assert "https:" not in text


def test_nothing_that_came_from_elsewhere_becomes_markup(get: Get) -> None:
    script = body_of(get("/page.js")).decode()
    assert "innerHTML" not in script
    assert "insertAdjacentHTML" not in script
    assert "document.write" not in script


@pytest.mark.parametrize("path", ["/nope", "//", "/status.json/", "/../style.css", "/index.html", "/page/style.css"])
def test_any_other_path_is_not_found(get: Get, path: str) -> None:
    assert get(path).status == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "TRACE", "PATCH"])
def test_only_reading_is_allowed(get: Get, method: str) -> None:
    answer = get("/status.json", method=method)
    assert (answer.status, answer.headers["Allow"]) == (405, "GET, HEAD")


def test_probes_tell_life_and_readiness_apart(content: AdminContent, get: Get) -> None:
    assert (get("/livez").status, get("/readyz").status) == (200, 503)
    content.health.set_serving(True)
    assert get("/readyz").status == 200
    content.health.set_alive(False)
    assert (get("/livez").status, get("/readyz").status) == (503, 200)


@pytest.mark.parametrize("path", ["/", "/status.json", "/livez", "/nope"])
def test_every_answer_forbids_framing_sniffing_and_foreign_resources(get: Get, path: str) -> None:
    headers = get(path).headers
    assert {name: headers[name] for name in HEADERS} == HEADERS
    policy = HEADERS["Content-Security-Policy"]
    assert "default-src 'self'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert HEADERS["X-Content-Type-Options"] == "nosniff"
    assert HEADERS["Cache-Control"] == "no-store"


# ---- names


@pytest.mark.parametrize("host", ["localhost", "localhost:8080", "127.0.0.1:9", "[::1]:9", "[::1]", "127.9.9.9"])
def test_on_loopback_its_own_names_are_answered_whatever_the_port(get: Get, host: str) -> None:
    assert get("/status.json", host=host).status == 200


@pytest.mark.parametrize(
    "host",
    [None, "", "evil.example", "evil.example:9", "127.0.0.1.evil.example", "localhost.evil", "10.0.0.1", "[::2]"],
)
@pytest.mark.parametrize("path", ["/status.json", "/livez", "/metrics"])
def test_on_loopback_no_other_name_is_answered(get: Get, host: str | None, path: str) -> None:
    assert get(path, host=host).status == 421


def test_a_port_that_is_open_to_others_answers_to_any_name(content: AdminContent) -> None:
    assert site_of(content, "0.0.0.0:9")("/status.json", host="router.prod.example").status == 200


# ---- tokens


@pytest.fixture
def locked(content: AdminContent, tmp_path: Path) -> Get:
    """Asks a site that wants TOKEN."""
    return site_of(content, tokens=Tokens(Pki(tmp_path).tokens(TOKEN)))


@pytest.mark.parametrize("path", ["/", "/page.js", "/status.json", "/metrics", "/targets", "/nope"])
def test_without_a_token_nothing_is_shown_and_a_browser_is_made_to_ask(locked: Get, path: str) -> None:
    answer = locked(path)
    assert answer.status == 401
    assert answer.headers["WWW-Authenticate"].startswith("Basic ")


def test_a_wrong_token_is_refused(locked: Get) -> None:
    assert locked("/metrics", authorization=f"Bearer {OTHER_TOKEN}").status == 401


@pytest.mark.parametrize(
    "authorization", [f"Bearer {TOKEN}", f"Basic {base64.b64encode(f'me:{TOKEN}'.encode()).decode()}"]
)
def test_the_token_opens_as_bearer_and_as_a_browsers_password(locked: Get, authorization: str) -> None:
    assert locked("/metrics", authorization=authorization).status == 200


def test_probes_need_no_token(content: AdminContent, locked: Get) -> None:
    content.health.set_serving(True)
    assert (locked("/livez").status, locked("/readyz").status) == (200, 200)
