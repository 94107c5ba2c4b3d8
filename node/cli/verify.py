"""`exo-node verify`: whether drafts can change answers on this machine, measured in a child."""

import json
from typing import TYPE_CHECKING, Annotated, Final

import typer

from .child import absolute, depth_error, local_model, model_facts, run_child
from .flags import Dtype, ModelsDir, argument, option, switch

if TYPE_CHECKING:
    from ..placements.local_model import LocalModel

_CHILD: Final = "exo_node.shard.tools.verify.main"
STDOUT: Final = "-"

_Model = Annotated[str, argument("[MODEL]", "A model's id, or a checkpoint's folder.")]
_Depth = Annotated[
    int | None, option("K", "Most drafts a round; default: the card's.", "--k", min=1)
]
_Quick = Annotated[bool, switch("Fewer prompts, tokens and samples.", "--quick")]
_Report = Annotated[
    str | None, option("FILE", "Write the report to send to us; - prints it instead.", "--report")
]


def verify(
    model: _Model = "demo",
    k: _Depth = None,
    dtype: Dtype = None,
    quick: _Quick = False,
    report: _Report = None,
    models_dir: ModelsDir = None,
) -> None:
    """Check that drafts change no answer of a model.

    It is checked on this machine. Exit status 1 where they do by more than rounding explains. No
    node has to run.
    """
    local, environment = local_model(model, dtype, models_dir)
    request = {
        **model_facts(local),
        "k": _depth(k, local),
        "quick": quick,
        "json_file": absolute(report) if report not in (None, STDOUT) else report or "",
        "quantization": local.card.quantization,
    }
    raise typer.Exit(run_child(_CHILD, json.dumps(request), environment))


def _depth(k: int | None, local: "LocalModel") -> int:
    """Drafts a round; 0 is the card's maximum."""
    most = local.spec.max_draft_tokens
    if k is None or not most:
        return 0
    if k > most:
        raise depth_error(k, local, most)
    return k
