"""Models of the Hugging Face Hub, `hf://OWNER/NAME[@REVISION][/FILE.gguf]`: fetched by huggingface_hub into its cache.

Only that scheme fetches anything. Tokens, cache, mirror and offline mode are the library's own settings: HF_TOKEN or
what `hf auth login` wrote, HF_HOME, HF_ENDPOINT, HF_HUB_OFFLINE. What is fetched is named here: config, tokenizer,
chat template and safetensors, or one GGUF file; never a pickle, never code.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from models.files.gguf import SUFFIX
from shell.progress import Step, steps
from tandem.errors import CheckpointError

SCHEME = "hf://"
_NAME = re.compile(rf"{SCHEME}([\w.-]+/[\w.-]+)(?:@(refs/pr/\d+|[^/@\s]+))?(?:/([^\s*?[]+{re.escape(SUFFIX)}))?")
_CONFIG = "config.json"
_TEXTS = (
    *(_CONFIG, "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("chat_template.jinja", "additional_chat_templates/*.jinja"),
)
_WEIGHTS = ("model*.safetensors", "model.safetensors.index.json")
"""Not all `*.safetensors`: some repositories hold the same weights in another layout too."""
_SNAPSHOT = re.compile(r"models--([^/]+)--([^/]+)/snapshots/[^/]+")
_MB = 10**6


def fetched(model: str, *, weights: bool = True) -> str:
    """Returns where `model` lies once it was fetched, if it is of the hub; else `model`. Raises CheckpointError."""
    return str(_fetch(model, weights=weights)) if model.startswith(SCHEME) else model


def hub_name(path: Path) -> str | None:
    """Returns OWNER/NAME of a folder in the library's cache, which is called after a commit; None for any other."""
    found = _SNAPSHOT.fullmatch("/".join(path.parts[-3:]))
    return f"{found[1]}/{found[2]}" if found else None


def _fetch(model: str, *, weights: bool) -> Path:
    found = _NAME.fullmatch(model)
    if found is None:
        raise CheckpointError(f"{model}: names no model of the hub: write hf://OWNER/NAME[@REVISION][/FILE{SUFFIX}]")
    repository, revision, file = found.groups()
    from huggingface_hub import errors

    wanted = [file] if file else [*_TEXTS, *(_WEIGHTS if weights else ())]
    try:
        folder = _download(repository, revision, wanted)
    except (OSError, ValueError, RuntimeError, errors.HTTPError) as error:  # type: ignore[attr-defined]  # its client's
        raise CheckpointError(f"{model}: {_problem(error, repository)}") from error
    if file is not None and not (folder / file).is_file():
        raise CheckpointError(f"{model}: no such file in the repository: look up its name at {_page(repository)}")
    if file is None and not (folder / _CONFIG).is_file():
        raise CheckpointError(f"{model}: holds no {_CONFIG}: of GGUF files name one, {SCHEME}{repository}/FILE{SUFFIX}")
    if file is None and weights and not any(folder.glob(_WEIGHTS[0])):
        raise CheckpointError(
            f"{model}: holds no safetensors, and nothing else is fetched: take a repository that does, or one of GGUF "
            f"files, {SCHEME}OWNER/NAME/FILE{SUFFIX}"
        )
    return folder / (file or "")


def _download(repository: str, revision: str | None, wanted: Sequence[str]) -> Path:
    """Returns the folder in the cache. Raises what the library raises."""
    from huggingface_hub import errors, hf_hub_download, snapshot_download

    snapshot: Any = partial(
        snapshot_download, repository, revision=revision, allow_patterns=list(wanted), tqdm_class=_bar(lambda: None)
    )
    try:
        missing = [each for each in snapshot(dry_run=True) if each.will_download]
    except errors.DryRunError:  # not reached, or not allowed: the cache may have it
        missing = []
    total = sum(each.file_size or 0 for each in missing) // _MB
    with steps(f"downloading {repository}, MB", total) as step:
        bar = _bar(step)
        for each in missing:
            hf_hub_download(repository, each.filename, revision=each.commit_hash, tqdm_class=bar)
    return Path(snapshot())


def _bar(step: Step) -> Any:
    """Returns the class of bars that draw nothing and call `step` for each MB of a file that was written."""
    from huggingface_hub import utils

    left = _MB
    tqdm: Any = utils.tqdm  # type: ignore[attr-defined]  # not re-exported, as its types have it

    class Bar(tqdm):  # type: ignore[misc]
        def __init__(self, *given: Any, **settings: Any) -> None:
            self._counts = settings.get("unit") == "B" and not str(settings.get("name")).endswith(".transfer")
            super().__init__(*given, **{**settings, "disable": True})

        def update(self, n: float | None = 1) -> None:
            nonlocal left
            left -= int(n or 0) if self._counts else 0
            while left <= 0:
                left += _MB
                step()

    return Bar


def _problem(error: Exception, repository: str) -> str:
    """What is wrong and what to do, in one line."""
    from huggingface_hub import constants, errors

    token = "set HF_TOKEN, or run `hf auth login`"
    if isinstance(error, errors.GatedRepoError):
        return f"is gated: accept its terms at {_page(repository)}, then {token}"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"no such repository: check the name; if it is private, {token}"
    if isinstance(error, errors.RevisionNotFoundError):
        return "no such revision: leave @REVISION out, or name a branch, a tag or a whole commit"
    if isinstance(error, errors.LocalEntryNotFoundError):
        where = f"{constants.HF_HUB_CACHE} does not have all of it"
        if constants.HF_HUB_OFFLINE:
            return f"{where}, and HF_HUB_OFFLINE forbids to fetch it: unset that, or HF_HOME of another cache"
        return f"{constants.ENDPOINT} does not answer, and {where}: check network, proxy and HF_ENDPOINT"
    return f"cannot be fetched: {str(error).partition(chr(10))[0]}: try again"


def _page(repository: str) -> str:
    from huggingface_hub import constants

    return f"{constants.ENDPOINT}/{repository}"
