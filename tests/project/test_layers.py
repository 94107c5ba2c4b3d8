"""The import fences, read from the syntax trees; each is seen to catch a seeded breach."""

import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

ROOMS: dict[str, str] = {
    "placement": "",
    "proto": "",
    "dashboard": "",
    "mtp": "mtp/caches mtp/families",
    "mtp/caches": "",
    "mtp/drafting": "mtp",
    "mtp/families": "mtp/caches",
    "shard": "",
    "shard/checkpoint": "placement",
    "shard/text": "placement mtp shard/checkpoint shard/text/grammars shard/text/tools",
    "shard/text/grammars": "placement shard/text/tools",
    "shard/text/tools": "shard/checkpoint",
    "shard/kernels": "placement mtp mtp/caches mtp/families",
    "shard/model": (
        "placement proto mtp mtp/caches mtp/families shard/kernels shard/text shard/checkpoint"
    ),
    "shard/pipeline": "placement proto mtp shard/model",
    "shard/engine": (
        "placement proto mtp mtp/caches mtp/drafting mtp/families "
        "shard/engine/prefixes shard/engine/states shard/engine/reading "
        "shard/pipeline shard/model shard/text shard/text/tools shard/checkpoint"
    ),
    "shard/engine/reading": (
        "placement proto mtp mtp/caches shard/engine/prefixes shard/engine/states "
        "shard/pipeline shard/model shard/checkpoint"
    ),
    "shard/engine/answers": (
        "placement proto mtp mtp/caches mtp/drafting mtp/families "
        "shard/engine shard/engine/prefixes shard/engine/reading "
        "shard/pipeline shard/model shard/kernels shard/text shard/checkpoint"
    ),
    "shard/engine/prefixes": (
        "placement proto mtp mtp/caches shard/engine/states shard/checkpoint"
    ),
    "shard/engine/states": "mtp mtp/caches",
    "shard/runner": (
        "placement proto mtp "
        "shard/engine shard/engine/answers shard/engine/prefixes shard/engine/reading "
        "shard/pipeline shard/model shard/kernels shard/text shard/text/grammars "
        "shard/text/tools shard/checkpoint"
    ),
    "shard/tools": "placement proto mtp mtp/drafting shard/engine shard/model shard/kernels",
    "shard/tools/convert": "placement mtp shard/model shard/checkpoint shard/tools",
    "shard/tools/verify": (
        "placement proto mtp mtp/caches mtp/families "
        "shard/engine shard/engine/states shard/model shard/kernels shard/text shard/tools"
    ),
    "shard/tools/share": (
        "placement proto mtp shard/engine shard/engine/answers shard/model shard/kernels "
        "shard/tools shard/tools/verify"
    ),
    "node/machine": "placement shard/checkpoint shard/kernels",
    "node/trust": "placement node/machine",
    "node/rpc": "placement proto node/trust node/machine",
    "node/runners": "placement proto node/rpc node/trust node/machine",
    "node/cluster": "placement proto shard/checkpoint node/rpc node/machine",
    "node/links": (
        "placement proto shard/checkpoint "
        "node/cluster node/runners node/rpc node/trust node/machine"
    ),
    "node/join": "placement proto node/cluster node/rpc node/trust node/machine",
    "node/store": (
        "placement proto shard/checkpoint node/cluster node/links node/rpc node/machine"
    ),
    "node/placements": (
        "placement proto shard/checkpoint "
        "node/cluster node/links node/runners node/rpc node/store node/trust node/machine"
    ),
    "node/chat": "placement proto mtp node/placements node/runners node/machine",
    "node/api": (
        "placement proto "
        "node/api/messages node/api/ollama node/api/openai node/api/responses "
        "node/api/operations node/api/shared node/api/http "
        "node/chat node/join node/trust node/machine"
    ),
    "node/api/ollama": (
        "placement proto mtp node/api/operations node/api/shared node/api/http node/chat node/trust"
    ),
    "node/api/messages": "placement proto node/api/openai node/api/shared node/api/http node/chat",
    "node/api/responses": (
        "placement proto node/api/openai node/api/shared node/api/http node/chat node/machine"
    ),
    "node/api/openai": "placement mtp proto node/api/shared node/api/http node/chat",
    "node/api/operations": "placement node/api/http node/join node/machine",
    "node/api/shared": "placement mtp proto node/api/http node/chat node/machine",
    "node/api/http": "placement node/chat node/trust node/machine",
    "node": (
        "placement proto mtp dashboard "
        "node/api node/api/http node/api/operations node/api/shared "
        "node/chat node/cluster node/join node/links node/machine "
        "node/placements node/rpc node/runners node/store node/trust"
    ),
    "node/cli": (
        "placement shard/checkpoint "
        "node node/join node/placements node/store node/trust node/machine"
    ),
}
"""The other rooms that each room may import. A room is a folder of modules; no arrow runs back."""

MODULES = {
    ("node", "mtp"): {"types"},
    **{(r, "mtp"): {"types"} for r in ("mtp/drafting", "shard/text")},
    ("node/cli", "node"): {"run"},
    ("node/cli", "shard/checkpoint"): {"vision"},
    ("node/machine", "shard/kernels"): {"cpu_code"},
    **{(r, "shard/checkpoint"): {"files"} for r in ("node/machine", "node/cluster")},
    ("shard/engine", "shard/checkpoint"): {"prefix_files"},
    ("shard/engine/answers", "shard/checkpoint"): {"files", "prefix_files"},
    **{
        (r, "shard/checkpoint"): {"files", "prefix_files"}
        for r in ("shard/engine/prefixes", "shard/engine/reading")
    },
    ("node/cli", "node/placements"): {"local_model"},
}
"""The only modules that may be imported from a room; `node` stands for its rooms too."""

_MLX_FREE = (
    "mtp/types.py",
    "shard/kernels/cpu_code.py",
    "shard/kernels/code_store.py",
    "shard/checkpoint/*",
)
LIBRARIES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("mlx", "mlx_lm", "transformers"), ("mtp/*", "shard/*")),
    "grpc": (
        "proto/*_pb2_grpc.py",
        "proto/checked_calls.py",
        "shard/pipeline/ring.py",
        "shard/runner/*",
        "node/rpc/*",
        "node/runners/runner_client.py",
        "node/trust/certificates.py",
    ),
    "zeroconf": ("node/cluster/discovery.py",),
    "huggingface_hub": (
        "node/store/hub_cache.py",
        "node/store/hub_client.py",
        "node/store/hub_download.py",
        "node/store/hub_search.py",
    ),
    "httpx2": (
        "node/store/hub_client.py",
        "node/store/hub_download.py",
        "node/store/hub_search.py",
        "node/cli/client.py",
    ),
    "llguidance": (
        "shard/text/grammars/grammar.py",
        "shard/text/grammars/grammars.py",
    ),
    "regex": ("shard/text/tools/call_scanners.py",),
    "jinja2": ("shard/text/template.py",),
    "typer": ("node/cli/*",),
    "prompt_toolkit": ("node/cli/chat.py",),
    "rich": ("node/cli/output.py", "node/cli/status.py", "shard/tools/verify/report.py"),
    "ssl": ("node/join/*",),
    "matplotlib": (),
    "exo_node_bench": ("node/cli/bench.py",),
    "starlette": ("node/api/*", "node/node_api.py"),
    "prometheus_client": ("node/chat/metrics.py", "node/chat/scrape.py"),
    "uvicorn": ("node/api/server.py", "node/api/http/connection_limits.py"),
    **dict.fromkeys(("pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "torch"), ()),
}
"""The files that may import a library; none may import libraries that run code in data."""

ENVIRONMENT = (
    "node/machine/setting_sources.py",
    "node/machine/settings.py",
    "shard/kernels/fused_code.py",
    "shard/model/fusing.py",
)
"""The last one has PATH only, by which MLX finds its compiler."""
_ENVIRONMENT_NAMES = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}

PURE = (
    "placement/*",
    "mtp/*",
    "shard/kernels/*",
    "node/cluster/membership.py",
    "node/cluster/election.py",
    "node/cluster/cluster_state.py",
    "node/join/calls.py",
    "node/join/handshake.py",
    "node/join/requests.py",
    "node/cluster/member.py",
)
NOT_PURE = tuple(
    f"shard/kernels/{name}.py"
    for name in ("install", "cpu_code", "cpu_products", "fused_code", "code_store")
)
"""The clocks by which kernels are chosen, compilers, and machine code on disk."""
IMPURE = {"asyncio", "os", "random", "secrets", "socket", "subprocess", "threading", "time"}
"""Clock, randomness and the outside world: pure files are given them as arguments."""

PAIRS = (
    ("shard/engine/answers/events", "shard/engine/answers/text_engine"),
    ("shard/engine/batch", "shard/engine/issued_round"),
)
"""Modules that import each other."""

_RUN_TEXT = {"eval", "exec", "compile", "__import__"}


@dataclass(frozen=True, slots=True)
class Import:
    """One imported module: `parts` of `shard.checkpoint`, `level` dots before it."""

    parts: tuple[str, ...]
    level: int

    @property
    def library(self) -> str | None:
        return None if self.level else self.parts[0]


def breaches(path: str, nodes: Sequence[ast.AST]) -> list[str]:
    """The forbidden imports and code in the file at `path` (such as `node/run.py`)."""
    imports = [
        b for each in _imports(nodes) for b in (*_of_rooms(path, each), *_of_libraries(path, each))
    ]
    return sorted({*imports, *_of_environment(path, nodes), *_of_code(nodes)})


def nodes_of(source: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(source)))


def _imports(nodes: Iterable[ast.AST]) -> Iterator[Import]:
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(tuple(alias.name.split(".")), 0)
        elif isinstance(node, ast.ImportFrom):
            stem = tuple(node.module.split(".")) if node.module else ()
            for alias in node.names:  # the last name may be a module
                yield Import((*stem, alias.name), node.level)


def _of_rooms(path: str, each: Import) -> Iterator[str]:
    here = path.rpartition("/")[0]
    if each.library == "exo_node":
        yield "imports exo_node by name; a module must not have two names, so import relatively"
    if not each.level:
        return
    above = ("exo_node", *here.split("/"))
    if each.level > len(above):
        yield "imports from above the package"
        return
    whole = (*above[1 : len(above) - each.level + 1], *each.parts)
    room = next(
        ("/".join(whole[:n]) for n in (3, 2, 1) if "/".join(whole[:n]) in {*ROOMS, "node"}),
        whole[0],
    )
    module = whole[room.count("/") + 1] if len(whole) > room.count("/") + 1 else "*"
    if room == here:
        return
    allowed = MODULES.get((here, room), MODULES.get((here.partition("/")[0], room)))
    if room not in ROOMS[here].split():
        yield f"{here} imports {room}"
    elif allowed is not None and module not in allowed:
        yield f"{here} imports {room}.{module}"


def _of_libraries(path: str, each: Import) -> Iterator[str]:
    library = each.library
    if library in LIBRARIES and not any(fnmatchcase(path, p) for p in LIBRARIES[library]):
        yield f"imports {library}"
    heavy = library in ("mlx", "mlx_lm", "transformers")
    if heavy and any(fnmatchcase(path, p) for p in _MLX_FREE):
        yield f"imports {library}, and the node imports this file"
    pure = path not in NOT_PURE and any(fnmatchcase(path, p) for p in PURE)
    if library in IMPURE and pure:
        yield f"is pure and imports {library}"


def _of_environment(path: str, nodes: Sequence[ast.AST]) -> Iterator[str]:
    if path in ENVIRONMENT:
        return
    imports = (node for node in nodes if isinstance(node, ast.Import))
    names = {a.asname or a.name for node in imports for a in node.names if a.name == "os"}
    for node in nodes:
        match node:
            case ast.Attribute(value=ast.Name(id=name), attr=attr) if name in names:
                used = {attr}
            case ast.ImportFrom(module="os", level=0):
                used = {alias.name for alias in node.names}
            case _:
                continue
        if used & _ENVIRONMENT_NAMES:
            yield "reads the environment"


def _of_code(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        match node:
            case ast.Name(id=name) if name in _RUN_TEXT:
                yield f"names {name}"
            case ast.Attribute(value=ast.Name(id="builtins"), attr=name) if name in _RUN_TEXT:
                yield f"names {name}"
            case ast.Attribute(value=ast.Name(id="asyncio"), attr="wait_for"):
                # Python 3.11's loses a cancel that comes as the work ends: a task that was to end
                # went on, and whoever closed a node waited for it. asyncio.timeout does not.
                yield "waits by wait_for"
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


BENCH = ROOT / "bench" / "exo_node_bench"
SOURCES = sorted(path for room in ROOMS for path in (ROOT / room).glob("*.py"))


@pytest.fixture(scope="module")
def product() -> dict[str, tuple[list[str], list[Import]]]:
    """The breaches and imports of each file of the product, by its name, such as node/run.

    Not the syntax trees: the garbage collector would walk them again and again.
    """
    facts: dict[str, tuple[list[str], list[Import]]] = {}
    for path in SOURCES:
        name, nodes = path.relative_to(ROOT).as_posix(), nodes_of(path.read_text())
        facts[name.removesuffix(".py")] = breaches(name, nodes), list(_imports(nodes))
    return facts


def test_every_folder_of_modules_is_a_room() -> None:
    folders = {each.partition("/")[0] for each in ROOMS}
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    rooms = {path.parent.relative_to(ROOT).as_posix() for path in files}
    assert rooms - set(ROOMS) == {"shard/models/demo/recipe"}


def test_the_arrows_between_rooms_make_no_circle() -> None:
    ordered: set[str] = set()
    while ready := {
        r for r, to in ROOMS.items() if r not in ordered and set(to.split()) <= ordered
    }:
        ordered |= ready
    assert set(ROOMS) - ordered == set()


def test_no_module_imports_itself_by_way_of_others(
    product: dict[str, tuple[list[str], list[Import]]],
) -> None:
    """But for two pairs, whose names in annotations go both ways."""
    graph: dict[str, set[str]] = {}
    for name, (_, imports) in product.items():
        above = name.split("/")
        targets = ((*above[: -each.level], *each.parts) for each in imports)
        names = {"/".join(parts[:end]) for parts in targets for end in (len(parts) - 1, None)}
        graph[name] = (names & product.keys()) - {name}
    for one, other in PAIRS:
        assert other in graph[one] and one in graph[other]
        graph[one].discard(other)
    assert len(list(TopologicalSorter(graph).static_order())) == len(product)


def test_no_room_that_a_request_passes_through_may_import_the_tools() -> None:
    """The command line starts them as processes, by the names of their modules."""
    importing = {room for room, others in ROOMS.items() if "shard/tools" in others}
    assert {room for room in importing if not room.startswith("shard/tools/")} == set()


def test_every_file_keeps_to_its_side_of_the_fences(
    product: dict[str, tuple[list[str], list[Import]]],
) -> None:
    assert {name: texts for name, (texts, _) in product.items() if texts} == {}


def test_code_that_is_not_in_a_folder_runs_no_text_either() -> None:
    files = [*ROOT.glob("bench/*.py"), *BENCH.rglob("*.py"), *ROOT.glob("tests/*.py")]
    # Where a test chooses a family by its name, and where nobody is waited for by a closing node.
    named = {"imports a module by a name in a string", "waits by wait_for"}
    wrong = {f.name: sorted({*_of_code(nodes_of(f.read_text()))} - named) for f in files}
    assert {name: texts for name, texts in wrong.items() if texts} == {}


@pytest.mark.parametrize(
    ("path", "source", "message"),
    [
        ("placement/plan.py", "from ..mtp.types import Round", "placement imports mtp"),
        ("placement/plan.py", "from .. import node", "placement imports node"),
        ("mtp/sampler.py", "from ..shard.model.load import load", "mtp imports shard/model"),
        ("dashboard/__init__.py", "from ..node import run", "dashboard imports node"),
        ("shard/pipeline/stage.py", "from ...node.machine import log", "imports node/machine"),
        ("shard/pipeline/stage.py", "from ...dashboard import asset", "imports dashboard"),
        ("shard/model/load.py", "from ..engine.engine import Engine", "imports shard/engine"),
        ("shard/checkpoint/headers.py", "from ..model import load", "imports shard/model"),
        ("node/chat/chat.py", "from ...mtp.accept import Rule", "node/chat imports mtp.accept"),
        ("node/chat/chat.py", "from ...mtp import types, accept", "node/chat imports mtp.accept"),
        ("node/chat/chat.py", "from ... import shard", "node/chat imports shard"),
        ("node/chat/chat.py", "def f():\n    from ...shard import engine", "imports shard/engine"),
        ("node/chat/chat.py", "from ..api.sse import frames", "node/chat imports node/api"),
        ("node/cluster/cluster.py", "from ..placements.record import R", "imports node/placements"),
        ("node/machine/log.py", "from ..trust import keys", "node/machine imports node/trust"),
        ("node/run.py", "from .cli import main", "node imports node/cli"),
        ("node/cli/main.py", "from ..node import Node", "node/cli imports node.node"),
        ("node/api/http/guard.py", "from ...cluster.cluster import C", "imports node/cluster"),
        ("shard/text/tools/schemas.py", "from ..codec import Codec", "imports shard/text"),
        ("node/chat/chat.py", "from exo_node.placement.plan import plan", "import relatively"),
        ("node/chat/chat.py", "from ....other import x", "from above the package"),
        ("shard/kernels/trial.py", "from ..model.load import load", "imports shard/model"),
        ("mtp/caches/rollback.py", "from ...shard.kernels import cuda", "imports shard/kernels"),
        ("node/machine/log.py", "from ...shard.kernels import cuda", "imports shard/kernels.cuda"),
        ("shard/kernels/cpu_code.py", "import mlx.core", "the node imports this file"),
        ("shard/engine/engine.py", "from ..tools.child import note", "imports shard/tools"),
        ("shard/model/load.py", "from ..tools.convert.graft import graft", "shard/tools/convert"),
        ("node/chat/chat.py", "from exo_node_bench.prompts import Prompt", "exo_node_bench"),
        ("node/chat/chat.py", "import mlx.core as mx", "imports mlx"),
        ("node/chat/chat.py", "if x:\n    from mlx_lm import load", "imports mlx_lm"),
        ("placement/plan.py", "import transformers", "imports transformers"),
        (
            "mtp/caches/rollback.py",
            "from ..families.qwen import X",
            "mtp/caches imports mtp/families",
        ),
        ("mtp/families/qwen.py", "from ..sampler import Sampler", "mtp/families imports mtp"),
        ("mtp/drafting/round_policy.py", "from ..sampler import Sampler", "imports mtp.sampler"),
        ("mtp/types.py", "import mlx.core as mx", "the node imports this file"),
        ("shard/checkpoint/checkpoint.py", "import mlx.core", "the node imports this file"),
        ("shard/pipeline/stage.py", "import grpc.aio", "imports grpc"),
        ("node/cluster/cluster.py", "from zeroconf import Zeroconf", "imports zeroconf"),
        ("node/store/library.py", "from huggingface_hub import HfApi", "imports huggingface_hub"),
        ("node/store/library.py", "import httpx2", "imports httpx2"),
        ("node/api/server.py", "from prometheus_client import Counter", "prometheus_client"),
        ("node/chat/chat.py", "import typer", "imports typer"),
        ("node/chat/chat.py", "import starlette", "imports starlette"),
        ("node/chat/chat.py", "import os\nos.environ['A']", "reads the environment"),
        ("shard/model/load.py", "from os import environ", "reads the environment"),
        ("node/join/wire.py", "import asyncio\nasyncio.wait_for(x, 1)", "waits by wait_for"),
        ("placement/plan.py", "import time", "is pure and imports time"),
        ("node/join/handshake.py", "from secrets import token_hex", "is pure and imports secrets"),
        ("node/join/joining.py", "import grpc.aio", "imports grpc"),
        ("node/cluster/cluster.py", "import ssl", "imports ssl"),
        ("shard/model/tensors.py", "import pickle", "imports pickle"),
        ("shard/model/tensors.py", "eval('1')", "names eval"),
        ("shard/model/tensors.py", "import builtins\nbuiltins.eval('1')", "names eval"),
        ("shard/model/tensors.py", "__import__('mlx')", "names __import__"),
        ("node/run.py", "import importlib\nimportlib.import_module('mlx')", "name in a string"),
        ("shard/text/codec.py", "load(trust_remote_code=True)", "trusts remote code"),
        ("shard/text/codec.py", "x = {'trust_remote_code': True}", "trusts remote code"),
        ("shard/text/codec.py", "x['trust_remote_code'] = True", "trusts remote code"),
    ],
)
def test_a_seeded_breach_is_found(path: str, source: str, message: str) -> None:
    texts = breaches(path, nodes_of(source))
    assert len(texts) == 1, texts
    assert message in texts[0]


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("node/store/library.py", "from ...shard.checkpoint.checkpoint import read_checkpoint"),
        ("node/store/library.py", "from ...shard.checkpoint import files, head_tensors"),
        (
            "shard/kernels/fused.py",
            "from . import product\nfrom ...mtp.caches.rollback import rollback",
        ),
        ("shard/tools/verify/main.py", "from ..child import note\nfrom ...model import load"),
        ("node/chat/chat.py", "from ...mtp.types import Sampling\nfrom ..machine import settings"),
        ("node/run.py", "from ..dashboard import asset\nfrom ..placement.plan import plan"),
        ("node/cli/start.py", "from ..run import run\nfrom ..machine.settings import Settings"),
        ("shard/engine/engine.py", "import mlx.core as mx\nfrom ...mtp.sampler import Sampler"),
        ("shard/text/codec.py", "load(trust_remote_code=False)\nx = {'trust_remote_code': False}"),
        ("node/trust/certificates.py", "import grpc\nimport os\nos.open('a', 0)"),
        ("node/machine/settings.py", "import os\nos.environ"),
        ("node/cluster/membership.py", "def apply(time): return time.environ"),
    ],
)
def test_what_is_allowed_is_let_through(path: str, source: str) -> None:
    assert breaches(path, nodes_of(source)) == []


def test_the_fences_name_files_that_exist() -> None:
    named = {*_MLX_FREE, *ENVIRONMENT, *PURE, *(p for paths in LIBRARIES.values() for p in paths)}
    assert [path for path in sorted({*named, *NOT_PURE}) if not any(ROOT.glob(path))] == []
    assert all((ROOT / b / f"{m}.py").exists() for (_, b), ms in MODULES.items() for m in ms)
