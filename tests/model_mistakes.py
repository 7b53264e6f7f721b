"""Mistakes with models: what is named by `--model`, and how a copy of the demo model is spoilt to make each."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.gguf_files import F32, container, metadata_of
from tests.mistake import Mistake

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1234567\n"
MODEL = "The model is refused"
_BESIDE = "put the tokenizer.json of the model that the file was made from beside it"


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


def quantized(**section: Any) -> Callable[[Path], Path]:
    return _config(quantization_config=section)


def _gguf(**tokenizer: Any) -> Callable[[Path], Path]:
    """A GGUF file of the model's sizes, with what it says of its tokenizer, and without weights."""

    def spoil(folder: Path) -> Path:
        config = json.loads((folder / "config.json").read_text())
        known = {key: value for key, value in metadata_of(config).items() if not key.startswith("tokenizer.")}
        said = {f"tokenizer.ggml.{key}": value for key, value in tokenizer.items()}
        embedding = ((config["vocab_size"], config["hidden_size"]), F32, b"")
        shutil.rmtree(folder)
        folder.mkdir()
        (folder / "model.gguf").write_bytes(container(known | said, {"token_embd.weight": embedding}))
        return folder / "model.gguf"

    return spoil


MODEL_MISTAKES = (
    Mistake(
        MODEL,
        "There is no such folder.",
        "…/nowhere: no such folder: --model takes a folder with config.json, a .gguf file, hf://OWNER/NAME, or `demo`",
        "Check the path; in a container, check what is mounted.",
        spoil=lambda folder: folder / "nowhere",
    ),
    Mistake(
        MODEL,
        "A name on a model hub is given without its scheme.",
        "Qwen/Qwen3-0.6B: no such folder: to fetch it from the hub, say --model hf://Qwen/Qwen3-0.6B",
        "Only a name that begins with `hf://` is fetched ([models.md](models.md#from-the-hub)).",
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
        "([CONTRIBUTING.md](../CONTRIBUTING.md#recipes)).",
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
        "…/config.json: model_type: 'idefics3' is more than a text model: take a text-only one, or one whose language "
        "part is served (…); served are …",
        "Take a text-only checkpoint, or one of those named: text is served of it.",
        spoil=_config(model_type="idefics3", text_config={"model_type": "llama"}),
    ),
    Mistake(
        MODEL,
        "The quantisation is not read.",
        "…/config.json: quantization_config.quant_method: 'bitsandbytes' is not read (…): take the checkpoint "
        "that it was "
        "made from, and --quantize",
        "[models.md](models.md) lists what is read. Else take the plain checkpoint with `--quantize int8`, "
        "`int4` or `fp8`.",
        spoil=quantized(quant_method="bitsandbytes", load_in_4bit=True),
    ),
    Mistake(
        MODEL,
        "ModelOpt's quantisation is of a form that is not read.",
        "…/config.json: quantization_config.quant_algo: 'W4A8_AWQ' is not read (FP8, NVFP4): take the checkpoint "
        "that it was made "
        "from, and --quantize",
        "Take the plain checkpoint with `--quantize fp8`, or one that says `fp8` or `compressed-tensors`.",
        spoil=quantized(quant_method="modelopt", quant_algo="W4A8_AWQ"),
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
    Mistake(
        MODEL,
        "A GGUF file has no tokenizer.",
        f"…/model.gguf: tokenizer.ggml.tokens: is missing: {_BESIDE}",
        "Files of newer converters have one.",
        spoil=_gguf(),
    ),
    Mistake(
        MODEL,
        "A GGUF file's tokenizer is of a kind that is not read.",
        f"…/model.gguf: tokenizer.ggml.model: 't5' is not read (gpt2, llama): {_BESIDE}",
        "It is then taken from there.",
        spoil=_gguf(model="t5", tokens=["a"]),
    ),
    Mistake(
        MODEL,
        "A GGUF file's tokenizer cuts texts in a way that is not known.",
        f"…/model.gguf: tokenizer.ggml.pre: 'bloom' is not known (…): {_BESIDE}",
        "It is then taken from there.",
        spoil=_gguf(model="gpt2", tokens=["a"], pre="bloom"),
    ),
)
