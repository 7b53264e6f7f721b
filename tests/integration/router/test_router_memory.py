"""What one caller's text takes of a router's memory at most."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
_SCRIPT = """
import asyncio
from pathlib import Path
from router.tokenization import Tokenization
from tandem.v1 import inference_pb2 as pb

def peak_mib():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) // 1024

async def main():
    tokenization = Tokenization.load(Path("models/demo/checkpoint"))
    text = ("Once upon a time there was a little girl, and she had 17 cats. " * 20_000)[: 1024 * 1024]
    await tokenization.encode_text(text[:100_000])
    before = peak_mib()
    response = pb.TokenizeResponse()
    def take(token_ids, tokens):
        response.token_ids.extend(token_ids)
        response.tokens.extend(tokens)
    await tokenization.describe(await tokenization.encode_text(text), take)
    print(peak_mib() - before, len(response.SerializeToString()))
    tokenization.close()

asyncio.run(main())
"""
BOUND_MIB = 60
"""For 1 MiB of text; it took 145 when the text was tokenized whole."""


def test_a_long_text_takes_a_bounded_part_of_the_routers_memory() -> None:
    told = subprocess.run([sys.executable, "-c", _SCRIPT], cwd=ROOT, capture_output=True, text=True, check=True)

    peak_mib, num_answer_bytes = map(int, told.stdout.split())
    assert num_answer_bytes > 1024 * 1024
    assert peak_mib < BOUND_MIB
