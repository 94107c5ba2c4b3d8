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
    int, typer.Argument(metavar="N", min=1, max=8, help="Copies, each on nodes of its own.")
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
    body = {"model": model, "replicas": count}
    placement = call(endpoint, "/v1/placements", body, timeout_s=None)
    placements: list[dict[str, Any]] = call(endpoint, "/v1/placements").get("data", [])
    copies = [each for each in placements if each.get("model") == placement.get("model")]
    ready = sum(each.get("status") == "ready" for each in copies)
    if as_json:
        print_json({"model": model, "replicas": count, "ready": ready, "placements": copies})
    elif ready < count:
        note(f"{model}: {ready} of {count} answer now; others are loaded where nodes have room")
    else:
        note(f"{model}: {ready} of {count} answer now")
