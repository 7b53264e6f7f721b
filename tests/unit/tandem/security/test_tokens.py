"""Which headers show a token of the file."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from tandem.errors import ConfigError
from tandem.security.tokens import Identity, Tokens
from tests.pki import OTHER_TOKEN, TOKEN, Pki, replace_file


def basic(user_and_password: str) -> str:
    return "Basic " + base64.b64encode(user_and_password.encode()).decode()


@pytest.mark.parametrize(
    "header", [f"Bearer {TOKEN}", f"bearer  {TOKEN} ", basic(f"anybody:{TOKEN}"), basic(f":{TOKEN}")]
)
def test_a_token_of_the_file_is_allowed(pki: Pki, header: str) -> None:
    assert Tokens(pki.tokens(OTHER_TOKEN, TOKEN)).allows(header)


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        TOKEN,
        "Bearer",
        "Bearer ",
        f"Bearer {TOKEN}x",
        f"Bearer {TOKEN[:-1]}",
        f"Bearer {TOKEN.upper()}",
        "Bearer # of a test",
        f"Digest {TOKEN}",
        basic(TOKEN),
        basic(f"{TOKEN}:"),
        "Basic not-base64",
        "Basic \u00e9",
        "Bearer \u00e9",
        "Bearer \udcff",
    ],
)
def test_anything_else_is_not(pki: Pki, header: str | None) -> None:
    assert not Tokens(pki.tokens(TOKEN)).allows(header)


def test_a_token_is_of_the_identity_that_its_line_names(pki: Pki) -> None:
    unnamed = "a-token-without-words"
    tokens = Tokens(pki.tokens(f"{TOKEN} name=batch max-priority=-1", f"{OTHER_TOKEN}\tmax-priority=9", unnamed))
    assert tokens.identify(f"Bearer {TOKEN}") == Identity("batch", -1)
    assert tokens.identify(basic(f":{OTHER_TOKEN}")) == Identity("", 9)
    assert tokens.identify(f"Bearer {unnamed}") == Identity()
    assert tokens.identify(f"Bearer {TOKEN} name=batch") is None
    assert tokens.bearer() == f"Bearer {TOKEN}"


def test_the_first_token_is_what_this_process_brings(pki: Pki) -> None:
    assert Tokens(pki.tokens(OTHER_TOKEN, TOKEN)).bearer() == f"Bearer {OTHER_TOKEN}"


def test_tokens_are_rotated_without_a_gap(pki: Pki) -> None:
    path = pki.tokens(TOKEN)
    tokens = Tokens(path)

    replace_file(path, f"{TOKEN}\n{OTHER_TOKEN}\n".encode())
    assert tokens.allows(f"Bearer {TOKEN}")
    assert tokens.allows(f"Bearer {OTHER_TOKEN}")
    assert tokens.bearer() == f"Bearer {TOKEN}"

    replace_file(path, f"{OTHER_TOKEN}\n".encode())
    assert not tokens.allows(f"Bearer {TOKEN}")
    assert tokens.bearer() == f"Bearer {OTHER_TOKEN}"


def test_an_emptied_file_keeps_the_old_tokens(pki: Pki) -> None:
    path = pki.tokens(TOKEN)
    tokens = Tokens(path)
    replace_file(path, b"")

    assert tokens.allows(f"Bearer {TOKEN}")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "holds no token"),
        (b"# only a comment\n", "holds no token"),
        (b"short\n", "line 1"),
        (f"{TOKEN}\nwith a blank inside it\n".encode(), "line 2"),
        (f"{TOKEN} name=\n".encode(), "line 1"),
        (f"{TOKEN} name=two words\n".encode(), "line 1"),
        (f"{TOKEN} max-priority=high\n".encode(), "line 1"),
        (f"{TOKEN} max-priority=123456789012\n".encode(), "line 1"),
        (f"{TOKEN} colour=red\n".encode(), "line 1"),
        (b"\xff\xfe\x00not-a-text-file-at-all", "line 1"),
        (b"#" * 70_000, "longer than"),
    ],
)
def test_a_file_that_cannot_be_meant_is_refused_without_showing_it(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "tokens"
    path.write_bytes(content)

    with pytest.raises(ConfigError, match=said) as refused:
        Tokens(str(path))

    assert refused.value.field == "--token-file"
    assert TOKEN not in refused.value.message
    assert "short\n" not in refused.value.message
