"""The router as a process: its one line, its exit codes, its signals."""

from __future__ import annotations

import asyncio
import shutil
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

TIMEOUT_S = 30.0


@asynccontextmanager
async def router(*argv: str) -> AsyncIterator[Process]:
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "router", *argv, stdout=PIPE, stderr=PIPE)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def ending(process: Process) -> tuple[int | None, str]:
    """Exit code and standard error."""
    async with asyncio.timeout(TIMEOUT_S):
        _, stderr = await process.communicate()
    return process.returncode, stderr.decode()


async def test_it_says_where_it_listens_and_ends_well_on_sigterm(byte_checkpoint: Path) -> None:
    async with router("--model", str(byte_checkpoint), "--listen", "127.0.0.1:0") as process:
        assert process.stdout is not None
        async with asyncio.timeout(TIMEOUT_S):
            line = (await process.stdout.readline()).decode()
        host, port = line.removeprefix("ready ").strip().split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.close()
        process.send_signal(signal.SIGTERM)
        code, _ = await ending(process)
        assert code == 0


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (("--patience-seconds", "-1"), "--patience-seconds"),
        (("--model", "/nowhere"), "/nowhere"),
        (("--listen", "nonsense"), "--listen"),
    ],
)
async def test_a_bad_option_ends_it_with_code_2_and_its_name(argv: tuple[str, ...], named: str) -> None:
    async with router(*argv) as process:
        code, stderr = await ending(process)
        assert code == 2
        assert named in stderr


async def test_a_broken_tokenizer_ends_it_with_code_2_and_the_file(byte_checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(byte_checkpoint, tmp_path, dirs_exist_ok=True)
    (tmp_path / "tokenizer.json").write_text("{}")
    async with router("--model", str(tmp_path), "--listen", "127.0.0.1:0") as process:
        code, stderr = await ending(process)
        assert code == 2
        assert "tokenizer.json" in stderr
