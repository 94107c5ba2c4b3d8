"""`exo-node events`: what happened in the cluster, one line each."""

import json
from collections.abc import Generator
from contextlib import closing
from datetime import datetime
from typing import TYPE_CHECKING, Any

from ..machine.events import EVENTS_PATH
from ..machine.log import escape_controls
from .client import Message, follow

if TYPE_CHECKING:
    from .client import Endpoint


def print_events(
    endpoint: "Endpoint", *, follows: bool, limit: int, own: bool, as_json: bool
) -> None:
    """Prints what is held, then, with `follows`, what happens. Raises CallFailed."""
    scope = "node" if own else "cluster"
    path = f"{EVENTS_PATH}?follow={int(follows)}&limit={limit}&scope={scope}"
    with closing(_events(endpoint, path)) as events:
        for event in events:
            print(json.dumps(event) if as_json else line(event), flush=True)


def line(event: dict[str, Any]) -> str:
    """`10:31:05 alpha is dead` in local time; a peer's words cannot draw on the terminal."""
    clock = datetime.fromtimestamp(float(event["time"])).strftime("%H:%M:%S")
    return escape_controls(f"{clock} {event['text']}")


def _events(endpoint: "Endpoint", path: str) -> Generator[dict[str, Any]]:
    for message in follow(endpoint, path):
        if isinstance(message, Message):
            yield json.loads(message.data)
