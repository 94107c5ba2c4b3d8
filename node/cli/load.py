"""`exo-node replicas`: how many copies of a model answer at the same time."""

from typing import Annotated, Any

import typer

from .client import call, connect
from .flags import AsJson, DataDir, LocalPort, models_on_disk
from .output import note, print_json

_Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="A model's id.", autocompletion=models_on_disk)
]
_Count = Annotated[
    str,
    typer.Argument(
        metavar="N", help="Copies, each on nodes of its own, or auto: as many as answers need."
    ),
]


def replicas(
    model: _Model,
    count: _Count,
    port: LocalPort = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Have N copies of a model answer at the same time, each on nodes of its own."""
    endpoint = connect(port, data_dir)
    replicas = _number(count)
    body = {"model": model, "replicas": replicas}
    placement = call(endpoint, "/v1/placements", body, timeout_s=None)
    placements: list[dict[str, Any]] = call(endpoint, "/v1/placements").get("data", [])
    copies = [each for each in placements if each.get("model") == placement.get("model")]
    ready = sum(each.get("status") == "ready" for each in copies)
    desired = int(placement.get("replicas", 1))
    missing = placement.get("replicas_missing") or "" if ready < desired else ""
    if as_json:
        print_json({"model": model, "replicas": replicas, "ready": ready, "placements": copies})
    elif replicas == "auto":
        note(f"{model}: {ready} answer now; others follow when answers share them for a while")
    else:
        note(f"{model}: {ready} of {desired} answer now" + (f"; {missing}" if missing else ""))


def _number(text: str) -> int | str:
    if text == "auto" or (text.isascii() and text.isdecimal() and 1 <= int(text) <= 8):
        return text if text == "auto" else int(text)
    raise typer.BadParameter(f"{text!r} is no number from 1 to 8, nor auto", param_hint="N")
