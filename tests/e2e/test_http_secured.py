"""OpenAI's and Anthropic's own clients over `tandem serve --http` with TLS, callers' certificates and a token."""

from __future__ import annotations

import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from bench.support.cluster import Cluster, becomes_idle, serve
from tandem.client import Client
from tests.at_rest import nothing_runs
from tests.http_address import http_address
from tests.pki import LOOPBACK, OTHER_TOKEN, TOKEN, Identity, Pki

CHAT = [{"role": "user", "content": "Tell me a story."}]
GREEDY: dict[str, Any] = {"model": "demo", "messages": CHAT, "temperature": 0}
PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    return Pki(tmp_path_factory.mktemp("pki"))


@pytest.fixture(scope="module")
def shown(pki: Pki) -> Identity:
    return pki.issue(LOOPBACK, "localhost")


@pytest.fixture(scope="module")
def cluster(pki: Pki, shown: Identity) -> Iterator[Cluster]:
    mutual = ("--tls-cert", shown.cert, "--tls-key", shown.key, "--tls-ca", pki.ca, "--tls-client-ca", pki.ca)
    with serve("demo", "--http", "127.0.0.1:0", "--token-file", pki.tokens(TOKEN), *mutual) as cluster:
        yield cluster
        with opened_directly(cluster, pki, shown) as direct:
            assert becomes_idle(direct), direct.status()


@pytest.fixture(scope="module")
def address(cluster: Cluster) -> str:
    return http_address(cluster)


@pytest.fixture(scope="module")
def trusting(pki: Pki, shown: Identity) -> ssl.SSLContext:
    """As `--tls-client-ca` asks callers for a certificate, this one shows one."""
    context = ssl.create_default_context(cafile=pki.ca)
    context.load_cert_chain(shown.cert, shown.key)
    return context


@pytest.fixture
def direct(cluster: Cluster, pki: Pki, shown: Identity) -> Iterator[Client]:
    """Afterwards no request may be under way."""
    with opened_directly(cluster, pki, shown) as direct:
        yield direct
        assert nothing_runs(direct), direct.status()


@pytest.fixture
def client(address: str, trusting: ssl.SSLContext, direct: Client) -> Iterator[openai.OpenAI]:
    with opened(address, trusting, TOKEN) as client:
        yield client


def opened_directly(cluster: Cluster, pki: Pki, shown: Identity) -> Client:
    return Client(cluster.target, security=pki.client(shown, pki.tokens(TOKEN)))


def opened(address: str, trusting: ssl.SSLContext, key: str) -> openai.OpenAI:
    http = openai.DefaultHttpxClient(verify=trusting)
    return openai.OpenAI(
        base_url=f"https://{address}/v1", api_key=key, max_retries=0, timeout=PATIENCE_S, http_client=http
    )


def test_a_streamed_chat_is_the_routers_own(client: openai.OpenAI, direct: Client) -> None:
    chunks = list(client.chat.completions.create(max_tokens=200, stream=True, **GREEDY))

    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)

    assert text == direct.complete(messages=CHAT, max_tokens=200, temperature=0.0).text
    assert len(chunks) > 4


def test_a_refusal_of_the_router_comes_through(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(max_tokens=4, extra_body={"structured_outputs": {"regex": "(a"}}, **GREEDY)
    assert "unclosed group" in str(refused.value)


@pytest.mark.parametrize("key", [{"auth_token": TOKEN}, {"api_key": TOKEN}])
def test_anthropics_client_brings_it_in_either_header(
    address: str, trusting: ssl.SSLContext, client: openai.OpenAI, key: dict[str, str]
) -> None:
    whole = client.chat.completions.create(max_tokens=16, **GREEDY).choices[0].message.content
    http = anthropic.DefaultHttpxClient(verify=trusting)
    with anthropic.Anthropic(base_url=f"https://{address}", http_client=http, **key) as other:
        said = other.messages.create(model="demo", max_tokens=16, messages=CHAT, extra_body={"temperature": 0})  # type: ignore[arg-type]
    assert said.content[0].text == whole  # type: ignore[union-attr]


@pytest.mark.parametrize("key", [OTHER_TOKEN, "none"])
def test_another_key_is_refused(address: str, trusting: ssl.SSLContext, key: str) -> None:
    with opened(address, trusting, key) as stranger, pytest.raises(openai.AuthenticationError):
        stranger.chat.completions.create(max_tokens=4, **GREEDY)


def test_without_a_certificate_nobody_is_heard(address: str, pki: Pki) -> None:
    with opened(address, ssl.create_default_context(cafile=pki.ca), TOKEN) as stranger, pytest.raises(openai.APIError):
        stranger.models.list()


def test_probes_need_no_token_and_all_else_does(address: str, trusting: ssl.SSLContext) -> None:
    def status(path: str) -> int:
        try:
            with urllib.request.urlopen(f"https://{address}{path}", timeout=PATIENCE_S, context=trusting) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            with error:
                return error.code

    assert [status(each) for each in ("/health", "/ping")] == [200, 200]
    assert [status(each) for each in ("/v1/models", "/metrics", "/version", "/nowhere")] == [401] * 4
