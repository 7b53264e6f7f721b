"""Mistakes of people who are new to Tandem: what each one did, what it is told, what helps.

`tests/e2e/test_mistakes.py` makes every one of them; `python -m tests.mistakes` writes
docs/troubleshooting.md from them.
"""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs" / "troubleshooting.md"
ANY = "…"
"""In a message: what differs from case to case."""
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1234567\n"

MODEL, START, CALL = "The model is refused", "A process does not start", "A request fails"


@dataclass(frozen=True, slots=True)
class Mistake:
    """One mistake. `{model}`, `{router}`, `{secure}`, `{token}`, … in `argv` are filled in by the test."""

    group: str
    what: str
    """What happened."""
    message: str
    """The last line on stderr, after `tandem: `."""
    remedy: str
    argv: tuple[str, ...] = ("doctor", "--model", "{model}")
    spoil: Callable[[Path], Path | str] = lambda folder: folder
    """Makes the mistake in a copy of the demo model; returns what `--model` then names."""
    own_process: bool = False
    """Whether the command would take over the signals of the tests' own process."""


def _config(**changes: Any) -> Callable[[Path], Path]:
    def spoil(folder: Path) -> Path:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))
        return folder

    return spoil


def _written(name: str, content: str) -> Callable[[Path], Path]:
    def spoil(folder: Path) -> Path:
        (folder / name).write_text(content)
        return folder

    return spoil


def _renamed(name: str, other: str) -> Callable[[Path], Path]:
    def spoil(folder: Path) -> Path:
        (folder / name).rename(folder / other)
        return folder

    return spoil


def _only(name: str, content: str = "{}") -> Callable[[Path], Path]:
    def spoil(folder: Path) -> Path:
        shutil.rmtree(folder)
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text(content)
        return folder

    return spoil


def _lost_shard(folder: Path) -> Path:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    return folder


def _cut(folder: Path) -> Path:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    return folder


def _quantized(**section: Any) -> Callable[[Path], Path]:
    return _config(quantization_config=section)


_MODELS = (
    Mistake(
        MODEL,
        "There is no such folder.",
        "…/nowhere: no such folder: --model takes a folder with config.json, a .gguf file, or `demo`",
        "Check the path; in a container, check what is mounted.",
        spoil=lambda folder: folder / "nowhere",
    ),
    Mistake(
        MODEL,
        "A name on a model hub is given.",
        "Qwen/Qwen3-0.6B: no such folder; nothing is fetched from a model hub: run `hf download Qwen/Qwen3-0.6B "
        "--local-dir DIR`, then say --model DIR",
        "Tandem fetches nothing. Download the model once, then name the folder.",
        spoil=lambda folder: "Qwen/Qwen3-0.6B",
    ),
    Mistake(
        MODEL,
        "The cache of a model hub is given.",
        "…: the cache of a model hub: name the folder …/snapshots/0123abc",
        "A hub's cache holds one folder for each version; name that one.",
        spoil=_only("snapshots/0123abc/config.json"),
    ),
    Mistake(
        MODEL,
        "The folder above the model is given.",
        "…: holds no config.json and no .gguf file; there is one in …/inner: name that folder",
        "Name the folder that holds config.json.",
        spoil=_only("inner/config.json"),
    ),
    Mistake(
        MODEL,
        "A folder without a model is given.",
        "…: holds no config.json and no .gguf file: download the whole model",
        "Download all files of the model.",
        spoil=_only("notes.txt"),
    ),
    Mistake(
        MODEL,
        "One file of a model is given.",
        "…/model.safetensors: a file, and none that ends in .gguf: name the folder that holds config.json",
        "Name the folder, not the file.",
        spoil=lambda folder: folder / "model.safetensors",
    ),
    Mistake(
        MODEL,
        "A LoRA adapter is given.",
        "…: a LoRA adapter, not a model: merge it into its base model, with `merge_and_unload` and "
        "`save_pretrained` of "
        "the package peft, and name the folder that this writes",
        "Tandem serves whole models. Merge the adapter once.",
        spoil=_only("adapter_config.json"),
    ),
    Mistake(
        MODEL,
        "The repository was cloned without Git LFS.",
        "…/model.safetensors: a pointer of Git LFS, not the file itself: run `git lfs pull` in …",
        "Install git-lfs, then run `git lfs pull` in the folder.",
        spoil=_written("model.safetensors", POINTER),
    ),
    Mistake(
        MODEL,
        "A shard of the weights was not downloaded.",
        "…/model-00002-of-00002.safetensors: file is missing, model.safetensors.index.json names it: download it too",
        "Download the missing file.",
        spoil=_lost_shard,
    ),
    Mistake(
        MODEL,
        "A download was interrupted.",
        "…/model.safetensors: is no readable safetensors file: it ends 1000 bytes too early: download it again",
        "Download the file again.",
        spoil=_cut,
    ),
    Mistake(
        MODEL,
        "The weights are no safetensors.",
        "…/model.safetensors: is no readable safetensors file: …: download it again",
        "Often a web page that was saved in place of the file. Download it again.",
        spoil=_written("model.safetensors", "<html>404: there is nothing here</html>"),
    ),
    Mistake(
        MODEL,
        "The weights are a pickle, such as pytorch_model.bin.",
        "…/model.safetensors: file is missing, and there is no model.safetensors.index.json; "
        "pytorch_model.bin could run "
        "code when it is loaded, only safetensors are: write them once with transformers, by `from_pretrained` and "
        "`save_pretrained`, where you trust the file",
        "Look for a version of the model in safetensors, or convert it once.",
        spoil=_renamed("model.safetensors", "pytorch_model.bin"),
    ),
    Mistake(
        MODEL,
        "There are no weights.",
        "…/model.safetensors: file is missing, and there is no model.safetensors.index.json; only safetensors "
        "are loaded: "
        "download the weights too",
        "Download the weights too.",
        spoil=_renamed("model.safetensors", "weights"),
    ),
    Mistake(
        MODEL,
        "config.json is damaged.",
        "…/config.json: …: download it again",
        "Download the file again.",
        spoil=_written("config.json", "{"),
    ),
    Mistake(
        MODEL,
        "The family is not served.",
        "…/config.json: model_type: 'mamba' is not served: take a model of a family that is; served are …",
        "[models.md](models.md) lists the families. A new one is a row of data where it differs little from a "
        "known one "
        "([extending.md](extending.md)).",
        spoil=_config(model_type="mamba", architectures=["MambaForCausalLM"]),
    ),
    Mistake(
        MODEL,
        "The model brings code of its own.",
        "…/config.json: model_type: 'own_code' brings code of its own, which is never run: take a model of a "
        "family that "
        "is served; served are …",
        "Tandem never runs code of a checkpoint (`trust_remote_code`).",
        spoil=_config(model_type="own_code", auto_map={"AutoModel": "modeling.Own"}),
    ),
    Mistake(
        MODEL,
        "The model also takes images or sound.",
        "…/config.json: model_type: 'llava' is more than a text model: take a text-only checkpoint of a family that is "
        "served; served are …",
        "Take the text-only checkpoint.",
        spoil=_config(model_type="llava", text_config={"model_type": "llama"}),
    ),
    Mistake(
        MODEL,
        "The quantisation is not read.",
        "…/config.json: quantization_config.quant_method: 'bitsandbytes' is not read (…): take the checkpoint "
        "that it was "
        "made from, and --quantize",
        "[models.md](models.md) lists what is read. Else take the plain checkpoint with `--quantize int8`, "
        "`int4` or `fp8`.",
        spoil=_quantized(quant_method="bitsandbytes", load_in_4bit=True),
    ),
    Mistake(
        MODEL,
        "FP8 of a form that is not read.",
        "…/config.json: quantization_config.quant_method: 'modelopt' is not read (…): take the checkpoint "
        "that it was made "
        "from, and --quantize",
        "Take the plain checkpoint with `--quantize fp8`, or one that says `fp8` or `compressed-tensors`.",
        spoil=_quantized(quant_method="modelopt", quant_algo="FP8"),
    ),
    Mistake(
        MODEL,
        "There is only a sentencepiece or tiktoken tokenizer.",
        "…/tokenizer.json: no such file, and tokenizer.model is not read: make it once, where transformers is "
        "installed: "
        "python -c …",
        "Run the command that the message gives, with sentencepiece or tiktoken installed.",
        spoil=_renamed("tokenizer.json", "tokenizer.model"),
    ),
    Mistake(
        MODEL,
        "There is no tokenizer.",
        "…/tokenizer.json: no such file: download it with the rest of the model",
        "Download tokenizer.json and tokenizer_config.json.",
        spoil=_renamed("tokenizer.json", "other"),
    ),
    Mistake(
        MODEL,
        "A GGUF file is damaged.",
        "…/model.gguf: is no readable GGUF file: …: download it again",
        "Download the file again.",
        spoil=lambda folder: _only("model.gguf", "not one")(folder) / "model.gguf",
    ),
)

_STARTS = (
    Mistake(
        START,
        "An option is misspelt.",
        "tandem serve: error: --kv-block: no such option; did you mean --kv-blocks?",
        "`tandem COMMAND --help` lists all options.",
        ("serve", "--kv-block", "7"),
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
        "The port is in use.",
        "--listen: cannot listen on …; is the port in use? Name another, or port 0 for any free one",
        "End the other process, or give another port.",
        ("router", "--listen", "{busy}"),
        own_process=True,
    ),
    Mistake(
        START,
        "A port is open to other machines without TLS and tokens.",
        "--listen: other machines can reach 0.0.0.0:0: give --tls-cert, --tls-key and --tls-ca and "
        "--token-file, or else "
        "--insecure",
        "[security.md](security.md) has the commands. `--insecure` is for networks where everyone may call.",
        ("serve", "--listen", "0.0.0.0:0"),
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
        _quantized(quant_method="gptq", bits=4, group_size=32),
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
        "A value is out of bounds.",
        "sampling.temperature: -1 is not in [0, 100]",
        "[sampling.md](sampling.md) lists the bounds.",
        ("generate", "hello", "--temperature", "-1", "--target", "{router}"),
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

MISTAKES = (*_MODELS, *_STARTS, *_CALLS)


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
