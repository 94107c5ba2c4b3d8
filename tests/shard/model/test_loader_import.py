"""mlx-lm's loader without transformers: what is imported then, and what still works."""

import json
import resource
import subprocess
import sys

import pytest
from engines import DEMO

from exo_node.shard.model import loader_import

CLASSES = """
import importlib, json, pkgutil, sys
{first}
import mlx_lm.models
found = {{}}
for module in pkgutil.iter_modules(mlx_lm.models.__path__):
    try:
        found[module.name] = sorted(vars(importlib.import_module("mlx_lm.models." + module.name)))
    except (Exception, SystemExit) as fault:
        found[module.name] = repr(fault)
print(json.dumps([found, "transformers.utils" in sys.modules]))
"""
LATER = """
import sys
from exo_node.shard.model import loader_import
import mlx_lm.utils
print("transformers.utils" in sys.modules, "huggingface_hub" in sys.modules)
loaded = mlx_lm.utils.load_tokenizer(__import__("pathlib").Path({folder!r}))
from mlx_lm.tokenizer_utils import TokenizerWrapper
print(isinstance(loaded, TokenizerWrapper), "transformers.utils" in sys.modules)
try:
    mlx_lm.utils.load("owner/model")
except Exception as fault:
    print(type(fault).__name__)
"""


def test_every_model_class_of_mlx_lm_is_the_same_without_transformers() -> None:
    bare, without = _run_program(CLASSES.format(first="import exo_node.shard.runner.main"))
    usual, with_it = _run_program(CLASSES.format(first="import mlx_lm"))
    assert len(usual) > 100 and bare == usual
    assert (without, with_it) == (False, True)


@pytest.mark.smoke
def test_what_is_left_out_is_imported_at_its_first_call_but_nothing_is_downloaded() -> None:
    lines = _output(LATER.format(folder=str(DEMO))).splitlines()
    assert lines == ["False False", "True True", "LoadFailed"]


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("soft", "hard", "changes"),
    [
        (1024, 65536, [(2048, 65536)]),
        (1024, resource.RLIM_INFINITY, [(2048, resource.RLIM_INFINITY)]),
        (256, 1024, [(1024, 1024)]),
        (1024, 1024, []),
        (65536, 65536, []),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, []),
    ],
)
def test_the_limit_of_open_files_is_raised_as_far_as_it_may_be_and_never_lowered(
    soft: int, hard: int, changes: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """mlx-lm's import sets 2048, and 4096 as the hard limit."""
    new_limits: list[tuple[int, int]] = []

    def limits(_: int) -> tuple[int, int]:
        return soft, hard

    def change(_: int, to: tuple[int, int]) -> None:
        new_limits.append(to)

    monkeypatch.setattr(resource, "getrlimit", limits)
    monkeypatch.setattr(loader_import, "_SET", change)
    keep = loader_import._raise_soft_limit  # pyright: ignore[reportPrivateUsage]
    keep(resource.RLIMIT_NOFILE, (2048, 4096))
    assert new_limits == changes


def _run_program(program: str) -> tuple[dict[str, object], bool]:
    values, heavy = json.loads(_output(program).splitlines()[-1])
    return values, heavy


def _output(program: str) -> str:
    command = [sys.executable, "-P", "-c", program]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
