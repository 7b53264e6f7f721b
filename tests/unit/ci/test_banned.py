"""The check that keeps dangerous calls out finds each of them, under any name, and nothing else."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable
from pathlib import Path

import pytest

CHECKS = Path(__file__).parents[3] / ".ci" / "checks"

Complain = Callable[..., list[str]]


@pytest.fixture
def complain(monkeypatch: pytest.MonkeyPatch) -> Complain:
    """What the check says of a piece of code."""
    monkeypatch.syspath_prepend(str(CHECKS))
    banned = importlib.import_module("banned")

    def of(code: str, name: str = "engine/x.py") -> list[str]:
        return [complaint for _, complaint in banned.findings(ast.parse(code), name)]

    return of


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "import cloudpickle as cp",
        "from pickle import loads",
        "from marshal import loads as l",
        "import _pickle",
        "import importlib\nimportlib.import_module('pickle')",
        "from importlib import import_module\nimport_module(name='dill')",
        "__import__('cloudpickle.compat')",
        "eval('1')",
        "exec('1')",
        "import builtins\nbuiltins.eval('1')",
        "run = eval",
        "import torch\ntorch.load('f')",
        "import torch as t\nt.load('f')",
        "from torch import load",
        "import torch\ntorch.serialization.load('f')",
        "import numpy\nnumpy.load('f', allow_pickle=True)",
        "load(path, allow_pickle=flag)",
        "import numpy as np\nnp.load('f', None, True)",
        "from numpy import load\nload('f', None, flag)",
        "import yaml\nyaml.load(text)",
        "import yaml\nyaml.load(text, Loader=yaml.Loader)",
        "import yaml\nyaml.load(text, yaml.FullLoader)",
        "from yaml import load\nload(text)",
        "import yaml\nyaml.load_all(text)",
        "import yaml\nyaml.unsafe_load(text)",
        "import yaml\nyaml.full_load(text)",
        "import subprocess\nsubprocess.run('ls', shell=True)",
        "import subprocess\nsubprocess.Popen('ls', shell=given)",
        "import os\nos.system('ls')",
        "from os import popen",
        "import asyncio\nasyncio.create_subprocess_shell('ls')",
        "from asyncio.subprocess import create_subprocess_shell",
        "import subprocess\nsubprocess.getoutput('ls')",
        "import subprocess\nsubprocess.getstatusoutput('ls')",
        "import pty\npty.spawn('sh')",
        "import ssl\nssl._create_unverified_context()",
        "import ssl\ncontext.verify_mode = ssl.CERT_NONE",
        "from ssl import CERT_NONE",
        "import ssl\ncontext.verify_mode = ssl.CERT_OPTIONAL",
        "import ssl\ncontext.verify_mode = ssl.VerifyMode.CERT_NONE",
        "context.verify_mode = 0",
        "context.verify_mode = asked",
        "context.check_hostname = False",
        "context.check_hostname = 0",
        "context.check_hostname = wanted",
        "one.check_hostname = other.check_hostname = False",
        "one.check_hostname, two = False, 2",
        "import torch.distributed\ntorch.distributed.all_gather_object(a, b)",
        "import torch.distributed as dist\ndist.broadcast_object_list(a)",
        "from torch.distributed import scatter_object_list",
        "from torch import distributed\ndistributed.gather_object(a)",
        "AutoModel.from_pretrained(path, trust_remote_code=True)",
        "AutoModel.from_pretrained(path, trust_remote_code=asked)",
        "AutoModel.from_pretrained(path, **{'trust_remote_code': True})",
        "raise NotImplementedError",
        "import os\nos.environ['A']",
        "import os as o\no.getenv('A')",
        "from os import environ\nenviron['A']",
        "import os\nos.environb[b'A']",
    ],
)
def test_it_is_found(complain: Complain, code: str) -> None:
    assert complain(code)


@pytest.mark.parametrize(
    "code",
    [
        "import json\njson.loads(text)",
        "model.eval()",
        "import safetensors.torch\nsafetensors.torch.load_file('f')",
        "import numpy\nnumpy.load('f', allow_pickle=False)",
        "import yaml\nyaml.safe_load(text)",
        "import yaml\nyaml.load(text, Loader=yaml.SafeLoader)",
        "import yaml\nyaml.load(text, yaml.CSafeLoader)",
        "import yaml\nyaml.load(text, yaml.BaseLoader)",
        "import subprocess\nsubprocess.run(['ls'], check=True)",
        "import subprocess\nsubprocess.run(['ls'], shell=False)",
        "import ssl\ncontext.verify_mode = ssl.CERT_REQUIRED",
        "import ssl\ncontext.verify_mode = ssl.VerifyMode.CERT_REQUIRED",
        "context.check_hostname = True",
        "print(context.check_hostname, context.verify_mode)",
        "import importlib\nimportlib.import_module('flash_attn')",
        "import importlib\nimportlib.import_module(name)",
        "import numpy\nnumpy.load('f', None, False)",
        "f(**{'shell': False, **others})",
        "import torch.distributed as dist\ndist.all_gather(a, b)",
        "AutoModel.from_pretrained(path, trust_remote_code=False)",
    ],
)
def test_what_is_harmless_is_let_through(complain: Complain, code: str) -> None:
    assert complain(code) == []


def test_the_environment_is_read_in_one_file(complain: Complain) -> None:
    code = "import os\nos.environ['A']"

    assert complain(code, "shell/config.py") == []
    assert complain(code, "cli/serve.py") == ["uses os.environ; only shell/config.py may"]
