"""`exo-node verify`: whether drafts can change answers on this machine, measured in a child."""

import json
from typing import TYPE_CHECKING, Annotated, Final

import typer

from .child import absolute, depth_error, local_model, model_facts, run_child
from .flags import Dtype, ModelsDir

if TYPE_CHECKING:
    from ..placements.local_model import LocalModel

_CHILD: Final = "exo_node.shard.tools.verify.main"
STDOUT: Final = "-"

_Model = Annotated[
    str, typer.Argument(metavar="[MODEL]", help="A model's id, or a checkpoint's folder.")
]
_Depth = Annotated[
    int | None,
    typer.Option("--k", min=1, metavar="K", help="Most drafts a round; default: the card's."),
]
_Quick = Annotated[bool, typer.Option("--quick", help="Fewer prompts, tokens and samples.")]
_Report = Annotated[
    str | None,
    typer.Option(
        "--json", metavar="FILE", help="Write the report to send to us; - prints it instead."
    ),
]


def verify(
    model: _Model = "demo",
    k: _Depth = None,
    dtype: Dtype = None,
    quick: _Quick = False,
    json_file: _Report = None,
    models_dir: ModelsDir = None,
) -> None:
    """Check that drafts change no answer of a model.

    It is checked on this machine. Exit status 1 where they do by more than rounding explains. No
    node has to run.
    """
    status = run_verify(
        model, k=k, dtype=dtype, quick=quick, json_file=json_file, models_dir=models_dir
    )
    raise typer.Exit(status)


def run_verify(
    model: str,
    *,
    k: int | None,
    dtype: str | None,
    quick: bool,
    json_file: str | None,
    models_dir: list[str] | None,
) -> int:
    """The exit status: 0 where the contract holds, 1 where a defect is shown.

    Raises InvalidSettings, ModelNotFound and what else `resolve` raises.
    """
    local, environment = local_model(model, dtype, models_dir)
    request = {
        **model_facts(local),
        "k": _depth(k, local),
        "quick": quick,
        "json_file": absolute(json_file) if json_file not in (None, STDOUT) else json_file or "",
        "quantization": local.card.quantization,
    }
    return run_child(_CHILD, json.dumps(request), environment)


def _depth(k: int | None, local: "LocalModel") -> int:
    """Drafts a round; 0 is the card's maximum."""
    most = local.spec.max_draft_tokens
    if k is None or not most:
        return 0
    if k > most:
        raise depth_error(k, local, most)
    return k
