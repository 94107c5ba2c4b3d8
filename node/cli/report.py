"""`exo-node report`: a file for an issue, or by `--share` a result of this machine to publish."""

import json
import math
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from ...placement.errors import ExoNodeError, InvalidSettings
from ..machine.private_files import update_private
from .child import local_model, model_facts, read_child
from .client import ApiEndpoint, Comment, call, client_settings, stream
from .doctor import check_all, endpoint_or_fault
from .flags import DataDir, LocalPort, ModelsDir, argument, option, switch
from .output import note
from .times import TIMES

if TYPE_CHECKING:
    from ..placements.local_model import LocalModel

_File = Annotated[str | None, argument("[FILE]", "Where to write it.")]
_Share = Annotated[
    bool,
    switch(
        "Measure a model here and write the figures to publish: no names, paths or texts.",
        "--share",
    ),
]
_Model = Annotated[
    str | None,
    option("MODEL", "The model of --share, an id or a checkpoint's folder; default: demo."),
]

_CHILD: Final = "exo_node.shard.tools.share.main"
_EVENTS: Final = 200
_FILE: Final = "exo-node-report.json"
_SHARED_FILE: Final = "exo-node-result.json"
_STEPS: Final = 1500
"""Forwards of one row that a shared result takes, about."""


def report(
    file: _File = None,
    share: _Share = False,
    model: _Model = None,
    port: LocalPort = None,
    data_dir: DataDir = None,
    models_dir: ModelsDir = None,
) -> None:
    """Write a report on a problem, or a result to publish.

    It is there to be attached to an issue, and holds versions, what `doctor` finds, the cluster,
    placements, statistics and events: no prompts, answers, keys or tokens. Read it before you send
    it; it has names of machines. With --share it is a small file of figures that has none.
    """
    if share:
        if port is not None or data_dir is not None:
            raise InvalidSettings(
                "--port and --data-dir name a node, which --share asks nothing; leave them out",
                param="--share",
            )
        _share(Path(file or _SHARED_FILE).expanduser(), model or "demo", models_dir)
        return
    if model is not None or models_dir:
        raise InvalidSettings("--model and --models-dir belong to --share; add it", param="--share")
    settings = client_settings(port, data_dir)
    endpoint = endpoint_or_fault(port, data_dir)
    findings = [asdict(each) for each in check_all(settings.data_dir, endpoint)]
    bundle: dict[str, Any] = {"format": "exo-node report 1", "findings": findings}
    if not isinstance(endpoint, ExoNodeError):
        bundle |= _public_state(endpoint)
    target = Path(file or _FILE).expanduser()
    _write(target, (json.dumps(bundle, indent=2) + "\n").encode())
    note(f"{target} is written; read it before you send it")


def _write(file: Path, content: bytes) -> None:
    try:
        update_private(file, content)
    except OSError as fault:
        raise ExoNodeError(f"{file} cannot be written: {fault.strerror}") from fault


def _share(file: Path, name: str, models_dir: list[str] | None) -> None:
    """Measures a model in a child and writes what may be published; else nothing."""
    if file.is_dir() or not os.access(file.absolute().parent, os.W_OK):
        raise InvalidSettings(f"{file} cannot be written; name another file", param="FILE")
    local, environment = local_model(name, None, models_dir)
    request = {
        **model_facts(local),
        "published_id": published_id(local),
        "quantization": local.card.quantization,
        "initial_k": local.initial_k,
        "limit_s": TIMES.share_s,
    }
    minutes, most = _minutes(local), TIMES.share_s / 60
    note(
        f"measures {local.card.id}: about {minutes:.0f} minutes, {most:.0f} at most. Stop a node "
        "that runs here, and other programs. Ctrl-C ends it, and nothing is written then"
    )
    status, result = read_child(_CHILD, json.dumps(request), environment, TIMES.share_s)
    if status:
        raise typer.Exit(status)  # the child has printed why
    _write(file, result)
    print(result.decode(), end="")
    note(f"{file} has these lines and no others; the README says where to send it")


def published_id(local: "LocalModel") -> str | None:
    """The id of a model that this package has a card of; None for others, which persons name."""
    from ...placement.library import packaged_cards

    cards = packaged_cards()
    published = {*cards, *(each.repository for c in cards.values() for each in c.variants)}
    return local.card.id if local.card.id in published else None


def _minutes(local: "LocalModel") -> int:
    """About how long a shared result takes, if a step takes as long as reading the weights."""
    reading_s = local.card.memory_bytes / max(local.hardware.bandwidth, 1e9)
    return min(2 + math.ceil(_STEPS * reading_s / 60), round(TIMES.share_s / 60))


def _public_state(endpoint: ApiEndpoint) -> dict[str, Any]:
    """Everything that any user of the node may read; the error of each part that fails."""
    state: dict[str, Any] = {}
    parts = {
        "cluster": "/v1/cluster",
        "placements": "/v1/placements",
        "models": "/v1/models",
        "settings": "/v1/settings",
        "statistics": "/v1/mtp/stats",
        "profile": "/v1/cluster/profile",
    }
    for name, path in parts.items():
        try:
            state[name] = call(endpoint, path, timeout_s=30)
        except ExoNodeError as fault:
            state[name] = {"error": fault.message}
    try:
        events = stream(endpoint, f"/v1/events?follow=0&limit={_EVENTS}")
        state["events"] = [each for each in events if not isinstance(each, Comment)]
    except ExoNodeError as fault:
        state["events"] = {"error": fault.message}
    return state
