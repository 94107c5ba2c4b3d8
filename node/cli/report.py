"""`exo-node report`: a file for an issue."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Final

from ...placement.errors import ExoNodeError
from ..machine.private_files import update_private
from .client import ApiEndpoint, call, follow
from .doctor import check_all, endpoint_or_fault
from .flags import DataDir, LocalPort, argument, client_settings
from .output import note

_File = Annotated[str | None, argument("[FILE]", "Where to write it.")]

_EVENTS: Final = 200
_FILE: Final = "exo-node-report.json"


def report(file: _File = None, port: LocalPort = None, data_dir: DataDir = None) -> None:
    """Write a report on a problem.

    It is there to be attached to an issue, and holds versions, what `doctor` finds, the cluster,
    placements, statistics and events: no prompts, answers, keys or tokens. Read it before you send
    it; it has names of machines.
    """
    settings = client_settings(port, data_dir)
    endpoint = endpoint_or_fault(port, data_dir)
    findings = [asdict(each) for each in check_all(settings.data_dir, endpoint)]
    bundle: dict[str, Any] = {"format": "exo-node report 1", "findings": findings}
    if not isinstance(endpoint, ExoNodeError):
        bundle |= _public_state(endpoint)
    target = Path(file or _FILE).expanduser()
    try:
        update_private(target, (json.dumps(bundle, indent=2) + "\n").encode())
    except OSError as fault:
        raise ExoNodeError(f"{target} cannot be written: {fault.strerror}") from fault
    note(f"{target} is written; read it before you send it")


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
        state["events"] = list(follow(endpoint, f"/v1/events?follow=0&limit={_EVENTS}"))
    except ExoNodeError as fault:
        state["events"] = {"error": fault.message}
    return state
