"""A file that changes while a model is loaded is refused: no fingerprint is of other bytes than those that compute."""

from __future__ import annotations

import os
import shutil
from functools import partial

import pytest
import torch

from bench.support.tiny_models import TinyModel, save_tiny_model
from kernels.dispatch import select_kernels
from models import fingerprint
from models.files.checkpoint import read_checkpoint
from models.loading import load_model
from tandem.errors import CheckpointError
from tests.gguf_files import Q8_0, write_gguf

CPU = torch.device("cpu")
TINY = TinyModel("llama", "llama")
WIDE = TinyModel("llama-wide", "llama", {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64})


def load(path, implementation="native"):
    kernels = select_kernels("auto", CPU, torch.float32)
    return load_model(path, "float32", CPU, kernels, None, implementation)


def other_bytes(file):
    content = bytearray(file.read_bytes())
    content[-1] ^= 0 if file.suffix == ".json" else 1
    return bytes(content)


def rename_over(file):
    """Puts an equally long file in its place, with its time."""
    new, stat = file.with_name("new"), file.stat()
    new.write_bytes(other_bytes(file))
    os.utime(new, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    new.rename(file)


def overwrite(file):
    """Changes it where it lies, and puts its time back."""
    stat = file.stat()
    with file.open("r+b") as opened:
        opened.write(other_bytes(file))
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def swing(file):
    """Makes a link to another file of what was one to the first."""
    target = file.resolve()
    other = target.with_name("other")
    other.write_bytes(other_bytes(target))
    file.unlink()
    file.symlink_to(other)


CHANGES = [rename_over, overwrite, swing]


@pytest.fixture
def between(monkeypatch):
    """Has something done after the weights are read, before they are hashed."""

    def arrange(action):
        def track(paths, what):
            action()
            return paths

        monkeypatch.setattr(fingerprint, "track", track)

    return arrange


@pytest.fixture
def folder(checkpoint, tmp_path):
    copy = shutil.copytree(checkpoint(TINY), tmp_path / "copy")
    (tmp_path / "blobs").mkdir()
    for file in copy.iterdir():  # links, as a model hub's cache has them
        blob = file.rename(tmp_path / "blobs" / file.name)
        file.symlink_to(blob)
    return copy


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
@pytest.mark.parametrize("implementation", ["native", "transformers"])
def test_a_file_that_changes_between_reading_and_hashing_is_refused(folder, between, implementation, name, change):
    between(partial(change, folder / name))
    with pytest.raises(CheckpointError, match=rf"{name}: changed while .* start again"):
        load(folder, implementation)


@pytest.mark.parametrize("name", ["model-00002-of-", "model.safetensors.index.json"])
@pytest.mark.parametrize("implementation", ["native", "transformers"])
def test_a_shard_or_an_index_that_changes_is_refused(tmp_path, between, implementation, name):
    folder = save_tiny_model(TINY, tmp_path / "sharded", max_shard_size="100KB")
    (file,) = folder.glob(f"{name}*")
    between(partial(rename_over, file))
    with pytest.raises(CheckpointError, match=rf"{name}.*: changed while"):
        load(folder, implementation)


@pytest.mark.parametrize("change", CHANGES)
def test_a_gguf_file_that_changes_is_refused(checkpoint, tmp_path, between, change):
    file, _ = write_gguf(checkpoint(WIDE), tmp_path, (Q8_0,))
    between(partial(change, file))
    with pytest.raises(CheckpointError, match=rf"{file.name}: changed while"):
        load(file)


def test_a_file_that_appears_and_would_be_read_is_refused(tmp_path, between):
    folder = save_tiny_model(TINY, tmp_path / "sharded", max_shard_size="100KB")
    between(lambda: shutil.copy(next(folder.glob("model-*")), folder / "model.safetensors"))
    with pytest.raises(CheckpointError, match=r"model\.safetensors: changed while"):
        load(folder)


def test_a_file_that_is_gone_is_refused(folder, between):
    between((folder / "model.safetensors").unlink)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: "):
        load(folder)


def test_a_link_to_another_folder_changes_nothing_of_what_is_loaded(folder, tmp_path, between):
    other, link = shutil.copytree(folder, tmp_path / "other"), tmp_path / "current"
    (other / "model.safetensors").unlink()
    (other / "model.safetensors").write_bytes(other_bytes((folder / "model.safetensors").resolve()))
    expected = load(folder).fingerprint
    link.symlink_to(folder)
    path = read_checkpoint(str(link)).path

    def turn():
        link.unlink()
        link.symlink_to(other)

    between(turn)
    assert load(path).fingerprint == expected
