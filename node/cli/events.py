"""`exo-node events`: what happened in the cluster, one line each."""

import json
from contextlib import closing
from datetime import datetime
from typing import Annotated, Any

from ..machine.events import EVENTS_PATH
from ..machine.log import escape_controls
from .client import connect, follow
from .flags import AsJson, DataDir, LocalPort, option, switch

_Follow = Annotated[bool, switch("Go on with what happens, until Ctrl-C.", "--follow", "-f")]
_Limit = Annotated[int, option("N", "The latest N of those before.", min=0, max=1000)]
_Own = Annotated[bool, switch("What this node saw itself, not what the head did.", "--node")]


def events(
    follows: _Follow = False,
    limit: _Limit = 100,
    own: _Own = False,
    port: LocalPort = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Show what happened in the cluster, one line each."""
    scope = "node" if own else "cluster"
    path = f"{EVENTS_PATH}?follow={int(follows)}&limit={limit}&scope={scope}"
    with closing(follow(connect(port, data_dir), path)) as stream:
        for event in stream:
            print(json.dumps(event) if as_json else event_line(event), flush=True)


def event_line(event: dict[str, Any]) -> str:
    """`10:31:05 alpha is dead` in local time; a peer's words cannot draw on the terminal."""
    clock = datetime.fromtimestamp(float(event["time"])).strftime("%H:%M:%S")
    return escape_controls(f"{clock} {event['text']}")
