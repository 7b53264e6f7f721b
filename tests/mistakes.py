"""Mistakes of people who are new to Tandem: what each one did, what it is told, what helps.

`tests/e2e/test_mistakes.py` makes every one of them; `python -m tests.mistakes` writes
docs/troubleshooting.md from them.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path

from tests.hub_mistakes import HUB_MISTAKES
from tests.mistake import Mistake
from tests.model_mistakes import MODEL_MISTAKES, quantized

PAGE = Path(__file__).parents[1] / "docs" / "troubleshooting.md"
ANY = "…"
"""In a message: what differs from case to case."""

START, CALL = "A process does not start", "A request fails"


def config_file(text: str) -> Callable[[Path], Path]:
    """Makes a file for `--config` beside the model."""

    def write(folder: Path) -> Path:
        file = folder.with_suffix(".yaml")
        file.write_text(text)
        return file

    return write


_STARTS = (
    Mistake(
        START,
        "A command is misspelt.",
        "error: sreve: no such command; did you mean serve?",
        "`tandem --help` lists all commands.",
        ("sreve",),
    ),
    Mistake(
        START,
        "An option is misspelt.",
        "tandem serve: error: --kv-memry: no such option; did you mean --kv-memory?",
        "`tandem COMMAND --help` lists all options.",
        ("serve", "--kv-memry", "7"),
    ),
    Mistake(
        START,
        "An option has no value.",
        "tandem serve: error: --model: expected one argument",
        "Write the value behind it.",
        ("serve", "--model"),
    ),
    Mistake(
        START,
        "A value is not one of the choices.",
        "--dtype: must be one of auto, float32, bfloat16, float16 (got 'int3')",
        "`tandem COMMAND --help` lists the choices.",
        ("serve", "--dtype", "int3"),
    ),
    Mistake(
        START,
        "A size is not one.",
        "--kv-memory: must be a size such as 4096, 512MiB or 2GiB (got 'lots')",
        "Write a number and a unit.",
        ("serve", "--kv-memory", "lots"),
    ),
    Mistake(
        START,
        "A name in the file of `--config` is misspelt.",
        "--config: kv-memry: this command has no such option; did you mean kv-memory?",
        "The file has the names of the command's options, without dashes ([options.md](options.md)).",
        ("serve", "--config", "{model}"),
        config_file("kv-memry: 7GiB"),
    ),
    Mistake(
        START,
        "A value in the file of `--config` is not one of the choices.",
        "--config: dtype: must be one of auto, float32, bfloat16, float16 (got 'int3')",
        "`tandem COMMAND --help` lists the choices.",
        ("serve", "--config", "{model}"),
        config_file("dtype: int3"),
    ),
    Mistake(
        START,
        "The port is in use.",
        "--listen: cannot listen on …; is the port in use? Name another, or port 0 for any free one",
        "End the other process, or give another port.",
        ("router", "--listen", "{busy}"),
        own_process=True,
    ),
    Mistake(
        START,
        "A port is open to other machines, and nothing asks who calls.",
        "--listen: other machines can reach 0.0.0.0:0: give --tls-cert, --tls-key and --tls-ca and "
        "--token-file or --tls-client-ca, or else "
        "--insecure",
        "[security.md](security.md) has the commands. `--insecure` is for networks where everyone may call.",
        ("serve", "--listen", "0.0.0.0:0"),
    ),
    Mistake(
        START,
        "The HTTP port is open to other machines, and nothing asks who calls.",
        "--http: other machines can reach 0.0.0.0:0: give --tls-cert, --tls-key and --tls-ca and "
        "--token-file or --tls-client-ca, or else --insecure",
        "[clients.md](clients.md) has the commands.",
        ("serve", "--listen", "127.0.0.1:0", "--http", "0.0.0.0:0"),
    ),
    Mistake(
        START,
        "The token file is not there.",
        "--token-file: …",
        "[security.md](security.md) says how to make one.",
        ("serve", "--listen", "127.0.0.1:0", "--token-file", "/nowhere/tokens"),
    ),
    Mistake(
        START,
        "A forced transport cannot work here.",
        "--transport: cuda_ipc does not work with KV on cpu: …; leave --transport out, or say one that works here: …",
        "Leave `--transport` out. `tandem doctor` says what works here, and why the rest does not.",
        ("doctor", "--model", "demo", "--device", "cpu", "--transport", "cuda_ipc"),
    ),
    Mistake(
        START,
        "Forced kernels cannot run here.",
        "--attention-backend: flash_attn cannot run on cpu: …; leave --attention-backend out",
        "Leave `--attention-backend` out.",
        ("doctor", "--model", "demo", "--device", "cpu", "--attention-backend", "flash_attn"),
    ),
    Mistake(
        START,
        "The GPU is not here.",
        "--device: cuda:63 is not here; … GPUs are: say --device cpu, or install torch for CUDA",
        "`tandem doctor` lists the GPUs that torch sees.",
        ("doctor", "--model", "demo", "--device", "cuda:63"),
    ),
    Mistake(
        START,
        "The pool is too small for one block.",
        "--kv-memory: holds no KV block of … bytes: give more, or a smaller --block-size",
        "`tandem doctor --model DIR --kv-memory SIZE` says how many contexts fit.",
        ("doctor", "--model", "demo", "--kv-memory", "1000"),
    ),
    Mistake(
        START,
        "The pool is larger than the memory.",
        "--kv-memory: … KV blocks take … bytes of cpu; … are available: ask for less",
        "Leave `--kv-memory` out, or give less.",
        ("doctor", "--model", "demo", "--device", "cpu", "--kv-memory", "900TiB"),
    ),
    Mistake(
        START,
        "A quantised checkpoint is to be quantised again.",
        "--quantize: the checkpoint is quantised already (gptq): leave it out",
        "Leave `--quantize` out.",
        ("doctor", "--model", "{model}", "--quantize", "int8"),
        quantized(quant_method="gptq", bits=4, group_size=32),
    ),
)

_CALLS = (
    Mistake(
        CALL,
        "Nobody listens at that address.",
        "UNAVAILABLE: …Connection refused; nobody listens there: start `tandem serve`, or name its address by --target",
        "Start the server, or check the address; in Kubernetes, the Service.",
        ("generate", "hello", "--target", "127.0.0.1:1"),
    ),
    Mistake(
        CALL,
        "A router has no workers.",
        "no decode worker can take it: none is registered; start one with --router and the address of this router",
        "`tandem status` lists the workers. A worker that was refused says so in its log, and so does the router.",
        ("generate", "hello", "--target", "{router}"),
    ),
    Mistake(
        CALL,
        "A chat with a model that has no chat template.",
        "chat: the model has no chat template: send text, or start the router with --chat-template",
        "Base models have none. Send text, or give a template ([clients.md](clients.md)).",
        ("chat", "--target", "{router}"),
    ),
    Mistake(
        CALL,
        "Another model is asked for.",
        "this router serves …, not the model asked for: ask for that, for none, or start the router with "
        "--served-model-name",
        "Leave the model's name empty, or serve it by the name that clients use.",
        ("generate", "hello", "--served-model", "gpt-4", "--target", "{router}"),
    ),
    Mistake(
        CALL,
        "The prompt is longer than the context.",
        "prompt: … tokens leave no room in a context of 1024: shorten the prompt",
        "Shorten the prompt.",
        ("generate", "--token-ids", ",".join(["5"] * 2000), "--target", "{router}"),
    ),
    Mistake(
        CALL,
        "More tokens are asked for than the context leaves after the prompt.",
        "sampling.max_tokens: 5000 tokens after a prompt of 3 exceed the model's context of 1024, which leaves 1021: "
        "shorten the prompt or lower max_tokens",
        "Ask for as many as it leaves, or leave `max_tokens` out.",
        ("generate", "--token-ids", "5,6,7", "--max-tokens", "5000", "--target", "{router}"),
    ),
    Mistake(
        CALL,
        "A value is out of bounds.",
        "sampling.temperature: -1 is not in [0, 100]",
        "[protocol.md](protocol.md#sampling-parameters) lists the bounds.",
        ("generate", "hello", "--temperature", "-1", "--target", "{router}"),
    ),
    Mistake(
        CALL,
        "A value is not a number.",
        "tandem generate: error: --temperature: invalid float value: 'hot'",
        "`tandem COMMAND --help` says what kind of value an option takes.",
        ("generate", "hello", "--temperature", "hot"),
    ),
    Mistake(
        CALL,
        "The server speaks TLS, the caller does not.",
        "UNAVAILABLE: …; does the server want TLS (--tls-ca), or a certificate of the caller (--tls-cert, --tls-key)?",
        "Give `--tls-ca`, the authority of the server's certificate.",
        ("generate", "hello", "--target", "{secure}"),
    ),
    Mistake(
        CALL,
        "The caller speaks TLS, the server does not.",
        "UNAVAILABLE: the server does not speak TLS; leave --tls-ca out, or start the server with --tls-cert "
        "and --tls-key "
        "(…)",
        "Leave `--tls-ca` out, or secure the server.",
        ("generate", "hello", "--target", "{router}", "--tls-ca", "{ca}"),
    ),
    Mistake(
        CALL,
        "The certificate is of an authority that the caller does not know.",
        "UNAVAILABLE: no authority that this side trusts (--tls-ca) vouches for the server's certificate (…)",
        "Give `--tls-ca` the authority that issued the server's certificate.",
        ("generate", "hello", "--target", "{secure}", "--tls-ca", "{other_ca}"),
    ),
    Mistake(
        CALL,
        "No token is brought.",
        "a bearer token is needed, in `authorization` metadata: give --token-file",
        "Give `--token-file`; other clients send `authorization: Bearer TOKEN` as metadata.",
        ("generate", "hello", "--target", "{secure}", "--tls-ca", "{ca}"),
    ),
    Mistake(
        CALL,
        "The token is wrong.",
        "the bearer token is not one of those accepted here: take one of the file that the server was given by "
        "--token-file",
        "Take a token of the server's file; a file that changed is read again within seconds.",
        ("generate", "hello", "--target", "{secure}", "--tls-ca", "{ca}", "--token-file", "{token}"),
    ),
)

MISTAKES = (*MODEL_MISTAKES, *HUB_MISTAKES, *_STARTS, *_CALLS)


@contextmanager
def busy_address() -> Iterator[str]:
    """An address at which somebody listens already."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield f"127.0.0.1:{taken.getsockname()[1]}"


def page() -> str:
    """docs/troubleshooting.md."""
    lines = [
        "# Troubleshooting",
        "",
        "By what you read on stderr. Every row is a test: the message is what the command prints, `…` stands for what "
        "differs.",
        "Written by `python -m tests.mistakes`; do not edit.",
        "",
        "`tandem doctor --model DIR` checks a model and the options of a worker before anything is started, and "
        "`tandem doctor`",
        "the machine. `tandem status` shows what a running router knows of its workers.",
    ]
    for group, found in groupby(MISTAKES, key=lambda each: each.group):
        lines += ["", f"## {group}", "", "| message | what happened, and what helps |", "|---|---|"]
        lines += [f"| {_code(each.message)} | {each.what} {each.remedy} |" for each in found]
    return "\n".join(lines) + "\n"


def _code(message: str) -> str:
    return f"`` {message} ``".replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page())
