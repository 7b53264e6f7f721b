"""generate and chat against a client that answers from a list."""

import io
import json
from collections.abc import Iterator
from typing import Any

import pytest

from cli import chat, generate
from cli.chat import Conversation
from cli.main import main
from shell.config import ClientSecurityConfig
from tandem.client import GenerationUpdate, ServedModel, Timings, Usage
from tandem.errors import TandemError, Unavailable
from tandem.types import FinishReason, TokenId


def update(text: str, *, last: bool = False) -> GenerationUpdate:
    return GenerationUpdate(
        request_id="r",
        index=0,
        text=text,
        token_ids=(TokenId(4),),
        logprobs=(),
        finish_reason=FinishReason.STOP if last else None,
        matched_stop=None,
        usage=Usage(3, 2, 0) if last else None,
        timings=Timings(0.001, 0.002, 0.003, 0.004, 0.005, 64) if last else None,
    )


class FakeClient:
    """Answers every request alike, or fails, or is interrupted like by ctrl-C."""

    def __init__(self) -> None:
        self.security = ClientSecurityConfig()
        self.asked: list[tuple[str | None, dict[str, Any]]] = []
        self.failure: TandemError | None = None
        self.interrupted = False

    def __call__(self, target: str, *, security: ClientSecurityConfig) -> "FakeClient":
        self.security = security
        return self

    def __enter__(self) -> "FakeClient":
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def model(self) -> ServedModel:
        return ServedModel("demo", "llama", 9, 512, frozenset(), True, 1, 1, 1, 1, 1)

    def generate(self, text: str | None = None, *, timeout_s: float, **options: Any) -> Iterator[GenerationUpdate]:
        # The list of messages goes on changing; what was asked is what it held then.
        self.asked.append((text, {**options, "messages": list(options.get("messages", ()))}))
        yield update("Once")
        if self.interrupted:
            raise KeyboardInterrupt
        if self.failure is not None:
            raise self.failure
        yield update(" upon", last=True)


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> FakeClient:
    fake = FakeClient()
    monkeypatch.setattr(generate, "Client", fake)
    monkeypatch.setattr(chat, "Client", fake)
    return fake


def conversation(client: Any, system: str | None = None) -> Conversation:
    return Conversation(client, {"temperature": 0.0}, 5.0, system)


def test_generate_streams_text_and_ends_the_line(client: FakeClient, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "p", "--temperature", "0", "--request-id", "r"]) == 0
    assert capsys.readouterr().out == "Once upon\n"
    assert client.asked == [("p", {"temperature": 0.0, "request_id": "r", "messages": []})]


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_security_options_reach_the_client(command: str, client: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"")))

    assert main([command, "--tls-ca", "ca.pem", "--token-file", "tokens", "--tls-server-name", "tandem"]) == 0

    assert client.security == ClientSecurityConfig(tls_ca="ca.pem", token_file="tokens", tls_server_name="tandem")


def test_generate_json_is_one_line_per_message(client: FakeClient, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "p", "--json", "--verbose"]) == 0
    printed = capsys.readouterr()
    lines = [json.loads(line) for line in printed.out.splitlines()]
    assert [line["text"] for line in lines] == ["Once", " upon"]
    assert lines[1]["finish_reason"] == "stop"
    assert "3 prompt (0 cached) + 2 completion" in printed.err


def test_generate_reads_its_prompt_from_stdin(client: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("grüße".encode())))
    assert main(["generate", "--chat"]) == 0
    assert client.asked[0][1]["messages"] == [{"role": "user", "content": "grüße"}]


def test_stdin_that_is_not_utf8_is_refused(
    client: FakeClient, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a\xff")))
    assert main(["generate"]) == 2
    assert "not UTF-8 at byte 1" in capsys.readouterr().err


def test_a_failed_request_is_exit_code_one_with_one_line(
    client: FakeClient, capsys: pytest.CaptureFixture[str]
) -> None:
    client.failure = Unavailable("worker decode-0 was lost")
    assert main(["generate", "p"]) == 1
    assert capsys.readouterr().err == "tandem: worker decode-0 was lost\n"


def test_ctrl_c_in_generate_is_exit_code_130(client: FakeClient) -> None:
    client.interrupted = True
    assert main(["generate", "p"]) == 130


def test_a_chat_sends_its_whole_history(client: FakeClient) -> None:
    talk = conversation(client, "be brief")
    talk.take_turn("one")
    talk.take_turn("two")
    asked = [message["content"] for message in client.asked[1][1]["messages"]]
    assert asked == ["be brief", "one", "Once upon", "two"]


def test_a_failed_turn_is_forgotten(client: FakeClient, capsys: pytest.CaptureFixture[str]) -> None:
    talk = conversation(client)
    client.failure = Unavailable("gone")
    talk.take_turn("one")
    assert talk.messages == []
    assert "gone" in capsys.readouterr().err


def test_ctrl_c_keeps_the_answer_so_far(client: FakeClient) -> None:
    talk = conversation(client)
    client.interrupted = True
    talk.take_turn("one")
    assert talk.messages[-1] == {"role": "assistant", "content": "Once"}


def test_chat_reads_lines_until_the_end_and_can_start_over(
    client: FakeClient, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n\n/reset\ntwo\n"))
    assert main(["chat"]) == 0
    assert [len(options["messages"]) for _, options in client.asked] == [1, 1]
    assert capsys.readouterr().out == "Once upon\nOnce upon\n"
