"""`exo-node report`: what helps to understand a problem, without prompts, answers and secrets."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import typer

from ...placement.errors import ExoNodeError
from ..machine.private_files import update_private
from .doctor import look, reached
from .flags import DataDir, LocalPort, client_settings

if TYPE_CHECKING:
    from .client import Endpoint

_EVENTS: Final = 200


def report(
    file: str = typer.Argument("exo-node-report.json", metavar="FILE", help="Where to write it."),
    port: LocalPort = None,
    data_dir: DataDir = None,
) -> None:
    """Write what helps to understand a problem into a file, to attach to an issue.

    It holds versions, what `doctor` finds, the cluster, placements, statistics and events: no
    prompts, answers, keys or tokens. Read it before you send it; it has names of machines.
    """
    settings = client_settings(port, data_dir)
    endpoint = reached(port, data_dir)
    findings = [asdict(each) for each in look(settings.data_dir, endpoint)]
    bundle: dict[str, Any] = {"format": "exo-node report 1", "findings": findings}
    if not isinstance(endpoint, ExoNodeError):
        bundle |= asked(endpoint)
    try:
        update_private(Path(file).expanduser(), (json.dumps(bundle, indent=2) + "\n").encode())
    except OSError as fault:
        raise ExoNodeError(f"{file} cannot be written: {fault.strerror}") from fault
    print(f"{file} is written; read it before you send it", file=sys.stderr)


def asked(endpoint: "Endpoint") -> dict[str, Any]:
    """What the node tells anybody who may look; a part that fails is told as its error."""
    from .client import Message, call, follow

    told: dict[str, Any] = {}
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
            told[name] = call(endpoint, path, timeout_s=30)
        except ExoNodeError as fault:
            told[name] = {"error": fault.message}
    try:
        events = follow(endpoint, f"/v1/events?follow=0&limit={_EVENTS}")
        told["events"] = [json.loads(e.data) for e in events if isinstance(e, Message)]
    except ExoNodeError as fault:
        told["events"] = {"error": fault.message}
    return told
