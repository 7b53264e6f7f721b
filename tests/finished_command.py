"""A `tandem` command that runs to its end; in end-to-end tests it is forked, as what `bench.support.cluster` starts."""

from __future__ import annotations

import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest

from bench.support import cluster

TIMEOUT_S = 60.0


def finished(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """What the command printed and its exit code. Raises TimeoutExpired, after killing it, if it does not end."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        process = cluster.open_command(*arguments)
    assert process.stdout is not None
    assert process.stderr is not None
    with process.stdout, process.stderr, ThreadPoolExecutor(2) as readers:
        stdout, stderr = readers.submit(process.stdout.read), readers.submit(process.stderr.read)
        try:
            code = process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
        return subprocess.CompletedProcess(arguments, code, stdout.result(), stderr.result())
