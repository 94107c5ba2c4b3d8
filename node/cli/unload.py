"""`exo-node models unload`: takes a model out of memory; its files stay."""

import json
import sys
from typing import Annotated, Any
from urllib.parse import quote

import typer

from ...placement.errors import PlacementNotFound
from .convert_models import models
from .flags import AsJson, DataDir, LocalPort, client_settings, known_placements

_Loaded = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="The id of a loaded model, or of its placement.",
        autocompletion=known_placements,
    ),
]


@models.command()
def unload(
    model: _Loaded, port: LocalPort = None, data_dir: DataDir = None, as_json: AsJson = False
) -> None:
    """Take a model out of memory, once its running answers have ended. Its files stay."""
    from .client import call, delete, locate

    endpoint = locate(client_settings(port, data_dir))
    loaded: list[dict[str, Any]] = call(endpoint, "/v1/placements").get("data", [])
    found = [each for each in loaded if model in (each.get("model"), each.get("id"))]
    if not found:
        names = ", ".join(sorted(str(each.get("model")) for each in loaded)) or "no model is"
        raise PlacementNotFound(f"{model} is not loaded; {names} now", param="MODEL")
    for placement in found:
        delete(endpoint, f"/v1/placements/{quote(str(placement['id']), safe='')}")
    if as_json:
        print(json.dumps({"model": model, "unloaded": [each["id"] for each in found]}, indent=2))
    else:
        print(f"{model} is unloaded", file=sys.stderr, flush=True)
