"""`exo-node bench mtp`: a model swept in a child process."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from exo_node.node.cli.child import absolute, depth_error, local_model, model_facts, run_child
from exo_node.node.cli.flags import Dtype, ModelsDir
from exo_node.placement.errors import InvalidSettings

from ..folder import claim, output_folder, release
from .request import JSON_FILE

if TYPE_CHECKING:
    from exo_node.node.placements.local_model import LocalModel

Json = Mapping[str, Any]

_CHILD: Final = "exo_node_bench.mtp.main"
_MAX_TEMPERATURE: Final = 2.0

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

    Prints tables; writes a page, JSON and CSV. Close other programs first.
    """
    if against not in (None, "mlx-lm"):
        raise _wrong("--against", f"{against!r}; it knows mlx-lm")
    depths = _parse_depths(k)
    folder = output_folder(output_dir, "mtp-bench", model)
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
    claim(folder, JSON_FILE)
    try:
        return run_child(_CHILD, json.dumps(request), environment)
    finally:  # if it failed, nothing was written
        release(folder, JSON_FILE)


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
    native = local.card.drafts
    if native is None or not local.spec.native_mtp:
        return []
    if depths is None:
        return list(range(1, native.max_k + 1))
    if depths and depths[-1] > native.max_k:
        raise depth_error(depths[-1], local, native.max_k)
    return depths


def _wrong(flag: str, what: str) -> InvalidSettings:
    return InvalidSettings(f"{flag}: {what}", param=flag)
