"""`exo-node bench share`: a model measured in a child process, and the figures to publish."""

import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from exo_node.node.cli.child import absolute, local_model, model_facts, read_child
from exo_node.node.cli.flags import ModelsDir
from exo_node.node.cli.output import note
from exo_node.node.machine.private_files import update_private
from exo_node.placement.errors import ExoNodeError, InvalidSettings

if TYPE_CHECKING:
    from exo_node.node.placements.local_model import LocalModel

_CHILD: Final = "exo_node_bench.share.main"
_LIMIT_S: Final = 900.0
_STEPS: Final = 1500
"""Forwards of one row that a result takes, about."""

_File = Annotated[str, typer.Argument(metavar="[FILE]", help="Where to write it.")]
_Model = Annotated[
    str, typer.Option(metavar="MODEL", help="A model's id, or a checkpoint's folder.")
]


def share(
    file: _File = "exo-node-result.json", model: _Model = "demo", models_dir: ModelsDir = None
) -> None:
    """Measure a model, and write figures to publish.

    The file has no names, paths or texts. No node is asked; stop one that runs here.
    """
    target = Path(absolute(file))
    if target.is_dir() or not os.access(target.parent, os.W_OK):
        raise InvalidSettings(f"{target} cannot be written; name another file", param="FILE")
    local, environment = local_model(model, None, models_dir)
    request = {
        **model_facts(local),
        "published_id": published_id(local),
        "quantization": local.card.quantization,
        "initial_k": local.initial_k,
        "limit_s": _LIMIT_S,
    }
    minutes, most = _minutes(local), _LIMIT_S / 60
    note(
        f"measures {local.card.id}: about {minutes:.0f} minutes, {most:.0f} at most. Stop a node "
        "that runs here, and other programs. Ctrl-C ends it, and nothing is written then"
    )
    status, result = read_child(_CHILD, json.dumps(request), environment, _LIMIT_S)
    if status:
        raise typer.Exit(status)  # the child has printed why
    try:
        update_private(target, result)
    except OSError as fault:
        raise ExoNodeError(f"{target} cannot be written: {fault.strerror}") from fault
    print(result.decode(), end="")
    note(f"{target} has these lines and no others; the README says where to send it")


def published_id(local: "LocalModel") -> str | None:
    """The id of a model that the product has a card of; None for others, which persons name."""
    from exo_node.placement.library import packaged_cards

    cards = packaged_cards()
    published = {*cards, *(each.repository for c in cards.values() for each in c.variants)}
    return local.card.id if local.card.id in published else None


def _minutes(local: "LocalModel") -> int:
    """About how long a result takes, if a step takes as long as reading the weights."""
    reading_s = local.card.memory_bytes / max(local.hardware.bandwidth, 1e9)
    return min(2 + math.ceil(_STEPS * reading_s / 60), round(_LIMIT_S / 60))
