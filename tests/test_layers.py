"""The import fences, read from the syntax trees; each is seen to catch a seeded breach."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

FOLDERS: dict[str, set[str]] = {
    "placement": set(),
    "proto": set(),
    "mtp": set(),
    "dashboard": set(),
    "shard": {"placement", "proto", "mtp"},
    "node": {"placement", "proto", "mtp", "shard", "dashboard"},
}
"""Which folder may import which others."""

MODULES = {
    ("node", "shard"): {"checkpoint", "download", "head_tensors", "kept_file"},
    ("node", "mtp"): {"types"},
}
"""Where only some modules of the other folder may be imported: those that are free of mlx."""

_MLX_FREE = (
    "mtp/types.py",
    "shard/checkpoint.py",
    "shard/download.py",
    "shard/head_layouts.py",
    "shard/head_storage.py",
    "shard/head_tensors.py",
    "shard/kept_file.py",
)
_GRPC = (
    "proto/*_pb2_grpc.py",
    "proto/bound_server.py",
    "shard/links.py",
    "shard/runner.py",
    "shard/runner_services.py",
    "shard/standby.py",
    "node/control_callers.py",
    "node/control_client.py",
    "node/control_links.py",
    "node/control_server.py",
    "node/trust.py",
)
LIBRARIES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("mlx", "mlx_lm", "transformers"), ("mtp/*", "shard/*")),
    "grpc": _GRPC,
    "zeroconf": ("node/discovery.py",),
    "huggingface_hub": ("shard/download.py",),
    "httpx2": ("shard/download.py", "shard/fetch.py"),
    "jinja2": ("shard/text.py",),
    "typer": (
        "node/cli.py",
        "node/cli_bench.py",
        "node/cli_flags.py",
        "node/cli_join.py",
        "node/cli_start.py",
    ),
    "ssl": ("node/join_*.py",),
    "matplotlib": ("shard/bench_plot.py",),
    "starlette": ("node/*",),
    "prometheus_client": ("node/metrics.py",),
    "uvicorn": ("node/http_server.py", "node/http_connection.py"),
    **dict.fromkeys(("pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "torch"), ()),
}
"""Which files may import a library; none may import what runs code that data holds."""

ENVIRONMENT = "node/settings.py"
_ENVIRONMENT_NAMES = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}

PURE = (
    "placement/*",
    "mtp/*",
    "node/membership.py",
    "node/election.py",
    "node/standing.py",
    "node/join.py",
    "node/join_open.py",
    "node/join_requests.py",
    "node/told.py",
)
IMPURE = {"asyncio", "os", "random", "secrets", "socket", "subprocess", "threading", "time"}
"""Clock, randomness and the outside world: pure files are given them as arguments."""

_RUN_TEXT = {"eval", "exec", "compile", "__import__"}


@dataclass(frozen=True, slots=True)
class Import:
    """One imported module: `parts` of `shard.checkpoint`, `level` dots before it."""

    parts: tuple[str, ...]
    level: int

    @property
    def library(self) -> str | None:
        return None if self.level else self.parts[0]


def breaches(path: str, source: str) -> list[str]:
    """What the file at `path` (such as `node/run.py`) must not say."""
    tree = ast.parse(source)
    found = [
        b for each in _imports(tree) for b in (*_of_folders(path, each), *_of_libraries(path, each))
    ]
    return sorted({*found, *_of_environment(path, tree), *_of_code(tree)})


def _imports(tree: ast.AST) -> Iterator[Import]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(tuple(alias.name.split(".")), 0)
        elif isinstance(node, ast.ImportFrom):
            stem = tuple(node.module.split(".")) if node.module else ()
            for alias in node.names:  # the last name may be a module
                yield Import((*stem, alias.name), node.level)


def _of_folders(path: str, each: Import) -> Iterator[str]:
    folder, top = path.partition("/")[0], path.count("/") + 1
    if each.library == "exo_node":
        yield "imports exo_node by name; a module must not have two names, so import relatively"
    if each.level > top:
        yield "imports from above the package"
    if each.level != top or each.parts[0] == folder:
        return
    other, module = each.parts[0], each.parts[1] if len(each.parts) > 1 else "*"
    allowed = MODULES.get((folder, other))
    if other not in FOLDERS[folder]:
        yield f"{folder} imports {other}"
    elif allowed is not None and module not in allowed:
        yield f"{folder} imports {other}.{module}"


def _of_libraries(path: str, each: Import) -> Iterator[str]:
    library = each.library
    if library in LIBRARIES and not any(fnmatchcase(path, p) for p in LIBRARIES[library]):
        yield f"imports {library}"
    if library in ("mlx", "mlx_lm", "transformers") and path in _MLX_FREE:
        yield f"imports {library}, and the node imports this file"
    if library in IMPURE and any(fnmatchcase(path, p) for p in PURE):
        yield f"is pure and imports {library}"


def _of_environment(path: str, tree: ast.AST) -> Iterator[str]:
    if path == ENVIRONMENT:
        return
    imports = (node for node in ast.walk(tree) if isinstance(node, ast.Import))
    names = {a.asname or a.name for node in imports for a in node.names if a.name == "os"}
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id=name), attr=attr) if name in names:
                used = {attr}
            case ast.ImportFrom(module="os", level=0):
                used = {alias.name for alias in node.names}
            case _:
                continue
        if used & _ENVIRONMENT_NAMES:
            yield "reads the environment"


def _of_code(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) if name in _RUN_TEXT:
                yield f"names {name}"
            case ast.Attribute(value=ast.Name(id="builtins"), attr=name) if name in _RUN_TEXT:
                yield f"names {name}"
            case ast.Attribute(attr="import_module") | ast.alias(name="import_module"):
                yield "imports a module by a name in a string"
            case ast.keyword(arg="trust_remote_code", value=value) if not _is_false(value):
                yield "trusts remote code"
            case ast.Dict(keys=keys, values=values):
                pairs = zip(keys, values, strict=True)
                if any(_is_text(k, "trust_remote_code") and not _is_false(v) for k, v in pairs):
                    yield "trusts remote code"
            case ast.Assign(targets=[ast.Subscript(slice=key)], value=value):
                if _is_text(key, "trust_remote_code") and not _is_false(value):
                    yield "trusts remote code"
            case _:
                pass


def _is_false(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def _is_text(node: ast.AST | None, text: str) -> bool:
    return isinstance(node, ast.Constant) and node.value == text


ROOMS = (*FOLDERS, "mtp/kernels")
SOURCES = sorted(path for folder in ROOMS for path in (ROOT / folder).glob("*.py"))


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: file.relative_to(ROOT).as_posix())
def test_a_file_keeps_to_its_side_of_the_fences(file: Path) -> None:
    assert breaches(file.relative_to(ROOT).as_posix(), file.read_text()) == []


def test_code_that_is_not_in_a_folder_runs_no_text_either() -> None:
    files = [*ROOT.glob("bench/*.py"), *ROOT.glob("tests/*.py")]
    named = {"imports a module by a name in a string"}  # where a test chooses a family by its name
    wrong = {f.name: sorted({*_of_code(ast.parse(f.read_text()))} - named) for f in files}
    assert {name: found for name, found in wrong.items() if found} == {}


@pytest.mark.parametrize(
    ("path", "source", "says"),
    [
        ("placement/plan.py", "from ..mtp.types import Round", "placement imports mtp"),
        ("placement/plan.py", "from .. import node", "placement imports node"),
        ("mtp/loop.py", "from ..shard.wire import to_bytes", "mtp imports shard"),
        ("dashboard/__init__.py", "from ..node import run", "dashboard imports node"),
        ("shard/stage.py", "from ..node.settings import Settings", "shard imports node"),
        ("shard/stage.py", "from ..dashboard import asset", "shard imports dashboard"),
        ("node/chat.py", "from ..mtp.loop import Task", "node imports mtp.loop"),
        ("node/chat.py", "from ..mtp import types, loop", "node imports mtp.loop"),
        ("node/chat.py", "from .. import shard", "node imports shard.*"),
        ("node/chat.py", "def f():\n    from ..shard import engine", "node imports shard.engine"),
        ("node/chat.py", "from exo_node.placement.plan import plan", "import relatively"),
        ("node/chat.py", "import exo_node.shard.engine", "import relatively"),
        ("node/chat.py", "from ...other import x", "from above the package"),
        ("mtp/kernels/trial.py", "from ....other import x", "from above the package"),
        ("mtp/kernels/trial.py", "from ...shard.load import load", "mtp imports shard"),
        ("mtp/kernels/trial.py", "import time", "is pure and imports time"),
        ("node/chat.py", "from ..mtp.kernels import install", "node imports mtp.kernels"),
        ("node/chat.py", "import mlx.core as mx", "imports mlx"),
        ("node/chat.py", "if x:\n    from mlx_lm import load", "imports mlx_lm"),
        ("placement/plan.py", "import transformers", "imports transformers"),
        ("mtp/types.py", "import mlx.core as mx", "the node imports this file"),
        ("shard/checkpoint.py", "import mlx.core", "the node imports this file"),
        ("shard/stage.py", "import grpc.aio", "imports grpc"),
        ("node/run.py", "from grpc import aio", "imports grpc"),
        ("node/cluster.py", "from zeroconf import Zeroconf", "imports zeroconf"),
        ("node/models.py", "from huggingface_hub import HfApi", "imports huggingface_hub"),
        ("node/models.py", "import httpx2", "imports httpx2"),
        ("node/chat.py", "from prometheus_client import Counter", "imports prometheus_client"),
        ("node/chat.py", "import os\nos.environ['A']", "reads the environment"),
        ("shard/load.py", "import os as system\nsystem.getenv('A')", "reads the environment"),
        ("shard/load.py", "from os import environ", "reads the environment"),
        ("placement/plan.py", "import time", "is pure and imports time"),
        ("node/election.py", "from random import random", "is pure and imports random"),
        ("node/join.py", "from secrets import token_bytes", "is pure and imports secrets"),
        ("node/join_requests.py", "import time", "is pure and imports time"),
        ("node/joining.py", "import grpc.aio", "imports grpc"),
        ("node/cluster.py", "import ssl", "imports ssl"),
        ("mtp/accept.py", "import asyncio", "is pure and imports asyncio"),
        ("shard/wire.py", "import pickle", "imports pickle"),
        ("shard/wire.py", "from marshal import loads", "imports marshal"),
        ("node/chat.py", "import dill", "imports dill"),
        ("shard/wire.py", "eval('1')", "names eval"),
        ("shard/wire.py", "run = exec", "names exec"),
        ("shard/wire.py", "import builtins\nbuiltins.eval('1')", "names eval"),
        ("shard/wire.py", "__import__('mlx')", "names __import__"),
        ("node/chat.py", "import importlib\nimportlib.import_module('mlx')", "name in a string"),
        ("node/chat.py", "from importlib import import_module", "name in a string"),
        ("shard/text.py", "load(trust_remote_code=True)", "trusts remote code"),
        ("shard/text.py", "load(trust_remote_code=wanted)", "trusts remote code"),
        ("shard/text.py", "x = {'trust_remote_code': True}", "trusts remote code"),
        ("shard/text.py", "x['trust_remote_code'] = True", "trusts remote code"),
    ],
)
def test_a_seeded_breach_is_seen(path: str, source: str, says: str) -> None:
    found = breaches(path, source)
    assert len(found) == 1, found
    assert says in found[0]


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("node/models.py", "from ..shard.checkpoint import read_checkpoint"),
        ("node/models.py", "from ..shard import download, head_tensors"),
        ("mtp/kernels/install.py", "from ..rollback import rollback\nfrom .trial import judge"),
        ("node/chat.py", "from ..mtp.types import Sampling\nfrom . import settings"),
        ("node/run.py", "from ..dashboard import asset\nfrom ..placement.plan import plan"),
        ("shard/engine.py", "import mlx.core as mx\nfrom ..mtp.loop import Task\nmx.eval(x)"),
        ("shard/text.py", "load(trust_remote_code=False)\nx = {'trust_remote_code': False}"),
        ("node/trust.py", "import grpc\nimport os\nos.open('a', 0)"),
        ("node/settings.py", "import os\nos.environ"),
        ("node/membership.py", "def apply(time): return time.environ"),
    ],
)
def test_what_is_allowed_is_let_through(path: str, source: str) -> None:
    assert breaches(path, source) == []


def test_the_fences_name_files_that_exist() -> None:
    named = {*_MLX_FREE, ENVIRONMENT, *PURE, *(p for paths in LIBRARIES.values() for p in paths)}
    assert [path for path in sorted(named) if not any(ROOT.glob(path))] == []
    assert all((ROOT / b / f"{m}.py").exists() for (_, b), ms in MODULES.items() for m in ms)


def test_the_node_process_loads_no_mlx() -> None:
    modules = [f"exo_node.node.{f.stem}" for f in (ROOT / "node").glob("*.py") if f.stem[0] != "_"]
    assert {"exo_node.node.run", "exo_node.node.cli"} <= set(modules)
    assert _loaded_with(*modules) == set()


def test_the_same_look_sees_mlx_in_a_runner() -> None:
    assert {"mlx", "mlx_lm"} <= _loaded_with("exo_node.shard.runner")


def _loaded_with(*modules: str) -> set[str]:
    """Which of the heavy libraries a fresh interpreter holds after importing `modules`."""
    script = f"import sys, {', '.join(modules)}\nprint(*sys.modules)"
    command = [sys.executable, "-P", "-c", script]
    loaded = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return {"mlx", "mlx_lm", "transformers", "torch"}.intersection(loaded)
