"""Mistakes with models of the hub; the test has a hub of its own at `{hub}`."""

from __future__ import annotations

from collections.abc import Mapping

from tests.mistake import Mistake

HUB = "A model is not fetched"
_HERE = {"HF_ENDPOINT": "{hub}", "HF_HOME": "{model}/home", "HF_TOKEN": ""}


def _mistake(what: str, message: str, remedy: str, model: str, environment: Mapping[str, str] = _HERE) -> Mistake:
    argv = ("doctor", "--model", model)
    return Mistake(HUB, what, f"{model}: {message}", remedy, argv, environment=environment)


HUB_MISTAKES = (
    _mistake(
        "A name on the hub is not one.",
        "names no model of the hub: write hf://OWNER/NAME[@REVISION][/FILE.gguf]",
        "Write it as its page has it, without https.",
        "hf://Qwen3-0.6B",
        {},
    ),
    _mistake(
        "There is no such repository.",
        "no such repository: check the name; if it is private, set HF_TOKEN, or run `hf auth login`",
        "Check the name; a private repository needs a token.",
        "hf://org/nothing",
    ),
    _mistake(
        "The model is gated.",
        "is gated: accept its terms at …/org/gated, then set HF_TOKEN, or run `hf auth login`",
        "Accept the terms on its page, and give a token of the same account.",
        "hf://org/gated",
    ),
    _mistake(
        "There is no such revision.",
        "no such revision: leave @REVISION out, or name a branch, a tag or a whole commit",
        "The page of its files lists branches and tags.",
        "hf://org/model@v9",
    ),
    _mistake(
        "There are no safetensors.",
        "holds no safetensors, and nothing else is fetched: take a repository that does, or one of GGUF files, "
        "hf://OWNER/NAME/FILE.gguf",
        "Look for a version in safetensors: a pickle can run code, and is never fetched.",
        "hf://org/pickled",
    ),
    _mistake(
        "There is no such file in the repository.",
        "no such file in the repository: look up its name at …/org/model",
        "Copy the name from the page of its files.",
        "hf://org/model/Q9.gguf",
    ),
    _mistake(
        "There is no network.",
        "http://127.0.0.1:9 does not answer, and … does not have all of it: check network, proxy and HF_ENDPOINT",
        "What was fetched once is served without a network, from the cache in HF_HOME.",
        "hf://org/model",
        {**_HERE, "HF_ENDPOINT": "http://127.0.0.1:9"},
    ),
    _mistake(
        "The library is offline by its settings, and the model is not in its cache.",
        "… does not have all of it, and HF_HUB_OFFLINE forbids to fetch it: unset that, or HF_HOME of another cache",
        "Fetch it once where there is a network, with the same HF_HOME.",
        "hf://org/model",
        {**_HERE, "HF_HUB_OFFLINE": "1"},
    ),
)
