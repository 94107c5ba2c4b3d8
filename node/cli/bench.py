"""`exo-node bench`: models measured in a child process, the cluster by its nodes."""

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from ...placement.errors import InvalidSettings
from . import output
from .child import absolute, depth_error, local_model, model_facts, run_child
from .client import call, connect
from .flags import AsJson, DataDir, Dtype, LocalPort, ModelsDir, group
from .output import table
from .plan import preview_path, preview_text

if TYPE_CHECKING:
    from ..placements.local_model import LocalModel

Json = Mapping[str, Any]

_CHILD: Final = "exo_node.shard.tools.bench.main"
_MAX_TEMPERATURE: Final = 2.0
_PROFILE: Final = "/v1/cluster/profile"
_MEASURE_LIMIT_S: Final = 300.0

_Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="A model's id, or a checkpoint's folder.")
]
_Depths = Annotated[
    str | None,
    typer.Option(
        "--k", metavar="K,K,…", help="Drafts a round to try; default: 1 to the card's max_k."
    ),
]
_Prompts = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help='One prompt a line, or .jsonl with "prompt"; default: the bundled 32.',
    ),
]
_MaxTokens = Annotated[int, typer.Option(min=2, metavar="N", help="Longest answer.")]
_Repeats = Annotated[int, typer.Option(min=1, metavar="N", help="Times that every prompt runs.")]
_Temperature = Annotated[
    float, typer.Option(min=0, max=_MAX_TEMPERATURE, metavar="T", help="0 is greedy.")
]
_Against = Annotated[
    str | None,
    typer.Option(
        metavar="mlx-lm", help="Run mlx-lm's own loop as well, on a second copy in memory."
    ),
]
_Adaptive = Annotated[
    bool, typer.Option("--adaptive/--no-adaptive", help="Run adaptive K as well.")
]
_Lookup = Annotated[
    bool, typer.Option("--lookup/--no-lookup", help="Run copied drafts (prompt lookup) as well.")
]
_Output = Annotated[
    str | None,
    typer.Option(
        "--output", metavar="DIR", help="Where results go; default: a new folder in mtp-bench here."
    ),
]
_PlacedModel = Annotated[
    str | None,
    typer.Option(metavar="ID", help="Say where this model would be placed, and why."),
]
_Measure = Annotated[bool, typer.Option("--measure", help="Measure every link anew first.")]

bench = group("Measure models on this machine, and the cluster.")


@bench.command()
def mtp(
    model: _Model = "demo",
    k: _Depths = None,
    prompts: _Prompts = None,
    max_tokens: _MaxTokens = 256,
    repeats: _Repeats = 3,
    temperature: _Temperature = 0.0,
    dtype: Dtype = None,
    against: _Against = None,
    adaptive: _Adaptive = True,
    lookup: _Lookup = True,
    output_dir: _Output = None,
    models_dir: ModelsDir = None,
) -> None:
    """Sweep K: speed, acceptance, break-even and time to first token.

    Prints tables; writes JSON, CSV and, with matplotlib, a plot. Close other programs first.
    """
    if against not in (None, "mlx-lm"):
        raise _wrong("--against", f"{against!r}; it knows mlx-lm")
    depths = _parse_depths(k)
    folder = _output_folder(output_dir, model)
    local, environment = local_model(model, dtype, models_dir)
    request: dict[str, object] = {
        **model_facts(local),
        "depths": _possible_depths(depths, local),
        "adaptive": adaptive and local.spec.native_mtp,
        "initial_k": local.initial_k,
        "lookup": lookup,
        "against_mlx_lm": against is not None,
        "prompts": None if prompts is None else absolute(prompts),
        "max_tokens": max_tokens,
        "repeats": repeats,
        "temperature": temperature,
        "output": str(folder),
    }
    raise typer.Exit(_run(request, folder, environment))


def _run(request: Json, folder: Path, environment: Mapping[str, str]) -> int:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _wrong("--output", f"{folder} cannot be made ({error.strerror})") from error
    try:
        return run_child(_CHILD, json.dumps(request), environment)
    finally:
        if not any(folder.iterdir()):  # it failed
            folder.rmdir()


def _parse_depths(text: str | None) -> list[int] | None:
    """Each K once, in order; 0 always runs and may be named."""
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() and len(part) < 4 for part in parts):
        raise _wrong("--k", f"{text!r}; write numbers with commas between them, such as 1,2,3")
    return sorted({int(part) for part in parts} - {0})


def _possible_depths(depths: list[int] | None, local: "LocalModel") -> list[int]:
    """The requested or all possible depths; none for a model that does not draft."""
    native = local.card.native_mtp
    if native is None or not local.spec.native_mtp:
        return []
    if depths is None:
        return list(range(1, native.max_k + 1))
    if depths and depths[-1] > native.max_k:
        raise depth_error(depths[-1], local, native.max_k)
    return depths


def _output_folder(path: str | None, model: str) -> Path:
    """A folder without files in it, so that no earlier result is overwritten."""
    if path is None:
        name = Path(model).expanduser().name or "model"
        return Path.cwd() / "mtp-bench" / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    folder = Path(path).expanduser().absolute()
    if folder.exists() and not folder.is_dir():
        raise _wrong("--output", f"{path} is not a folder; name another one")
    if folder.is_dir() and any(folder.iterdir()):
        raise _wrong("--output", f"{path} is not empty; name a new folder")
    return folder


def _wrong(flag: str, what: str) -> InvalidSettings:
    return InvalidSettings(f"{flag}: {what}", param=flag)


# ---------------------------------------------------------------------------- the cluster


@bench.command()
def cluster(
    model: _PlacedModel = None,
    measure: _Measure = False,
    port: LocalPort = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Show what the cluster's nodes and links were measured to do.

    A running node is asked. Layers are timed when a node first loads a model, links when a node
    joins and every few minutes while nothing is generated.
    """
    endpoint = connect(port, data_dir)
    profile = call(endpoint, _PROFILE, {} if measure else None, timeout_s=_MEASURE_LIMIT_S)
    preview = None if model is None else call(endpoint, preview_path(model, {}))
    if as_json:
        output.print_json({"profile": profile, "plan": preview})
        return
    parts = [profile_text(profile, output.terminal_width())]
    if preview is not None:
        parts.append(preview_text(preview))
    print("\n\n".join(parts))


def profile_text(profile: Json, width: int | None = None) -> str:
    """Nodes, layers of each model, links, and the models that must stay on one node."""
    nodes: Sequence[Json] = profile.get("nodes", [])
    links: Sequence[Json] = profile.get("links", [])
    names = {node["id"]: str(node["name"]) for node in nodes}
    header = ("NODE", "CHIP", "BACKEND", "MEMORY", "BANDWIDTH", "ADDRESSES")
    refusals = {model: why for node in nodes for model, why in node["split_refusals"].items()}
    return output.joined(
        [
            *table(header, map(_node_row, nodes), width=width),
            "",
            *_layer_lines(nodes, width),
            "",
            *_link_lines(links, names, width),
            *(f"{model} runs on one node only: {why}" for model, why in sorted(refusals.items())),
        ]
    )


def _node_row(node: Json) -> tuple[str, ...]:
    bandwidth = node["memory_bandwidth"]
    return (
        str(node["name"]),
        str(node["chip"]),
        str(node["backend"]),
        f"{node['memory_bytes'] / 1e9:.1f} GB",
        f"{bandwidth / 1e9:.0f} GB/s" if bandwidth else "-",
        ", ".join(map(str, node["addresses"])),
    )


def _layer_lines(nodes: Sequence[Json], width: int | None) -> list[str]:
    """A row for each model that a node has measured."""
    rows = sorted(
        (
            str(times["model"]),
            str(node["name"]),
            str(times["dtype"]),
            _ms(times["decode_s"]),
            f"{_ms(times['verify_s'])} ({times['verify_rows']} rows)",
            f"{_ms(times['prefill_s'])} ({times['prefill_rows']} rows)",
            _ms(times["tail_s"]),
        )
        for node in nodes
        for times in node["layers"]
    )
    if not rows:
        return ["no model was timed yet: that happens when a node loads one for the first time"]
    header = ("MODEL", "NODE", "DTYPE", "1 ROW", "VERIFY", "CHUNK", "TAIL")
    note = "ms for one layer; the tail is final norm and lm_head, timed on a generator"
    return [*table(header, rows, width=width), note]


def _link_lines(links: Iterable[Json], names: Mapping[str, str], width: int | None) -> list[str]:
    rows = [
        (
            " - ".join(names.get(node, str(node)) for node in link["nodes"]),
            " - ".join(map(str, link["addresses"])),
            _ms(link["round_trip_min_s"]),
            _ms(link["round_trip_s"]),
            f"{link['bandwidth'] / 1e6:.0f} MB/s" if link["bandwidth"] else "-",
            f"{link['age_s']} s",
            "yes" if link["chosen"] else "",
        )
        for link in links
    ]
    if not rows:
        return [] if len(names) < 2 else ["no link was measured yet: try again in a moment"]
    header = ("LINK", "ADDRESSES", "RTT MIN", "RTT P50", "BANDWIDTH", "AGE", "USED")
    note = "round trips in ms; stages talk over the links that are used"
    return [*table(header, rows, width=width), note]


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.3g}"
