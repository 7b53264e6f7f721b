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
_CALLS = """
import asyncio
from pathlib import Path
import grpc
from tandem.rpc.channel import open_channel
from shell.rpc.server import RpcServer, Service
from tandem.v1 import inference_pb2 as pb, inference_pb2_grpc as rpc

def resident_mib():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) // 1024

class Answering(rpc.InferenceServiceServicer):
    async def Tokenize(self, request, context):
        return pb.TokenizeResponse()

async def main():
    def register(server):
        rpc.add_InferenceServiceServicer_to_server(Answering(), server)
    server = RpcServer("127.0.0.1:0", [Service("tandem.v1.InferenceService", register)], announce_s=0)
    channel = open_channel(f"127.0.0.1:{await server.start()}")
    call, request = rpc.InferenceServiceStub(channel).Tokenize, pb.TokenizeRequest(text="a" * 4_000_000)
    for _ in range(4):
        await call(request)
    before = resident_mib()
    for _ in range(40):
        await call(request)
    print(resident_mib() - before)
    await channel.close()
    await server.drain(0)

asyncio.run(main())
"""
BOUND_MIB = 60
"""For 1 MiB of text; it took 145 when the text was tokenized whole."""


def test_a_long_text_takes_a_bounded_part_of_the_routers_memory() -> None:
    told = subprocess.run([sys.executable, "-c", _SCRIPT], cwd=ROOT, capture_output=True, text=True, check=True)

    peak_mib, num_answer_bytes = map(int, told.stdout.split())
    assert num_answer_bytes > 1024 * 1024
    assert peak_mib < BOUND_MIB


def test_the_requests_of_calls_that_have_ended_are_not_kept() -> None:
    """Of 4 MB each, forty in all."""
    told = subprocess.run([sys.executable, "-c", _CALLS], cwd=ROOT, capture_output=True, text=True, check=True)

    assert int(told.stdout) < BOUND_MIB
