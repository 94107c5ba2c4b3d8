"""`exo-node top`: nodes, placements and requests as they are now, again and again on a terminal."""

import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Final

from . import top_view
from .client import CallFailed, call, locate, read_text

if TYPE_CHECKING:
    from ..machine.settings import ClientSettings

_EVERY_S: Final = 1.0

Width = Callable[[], int | None]
"""Of the terminal in characters, which may change; None where there is none."""
Read = Callable[[], top_view.Reading]


def run_top(settings: "ClientSettings", *, once: bool, as_json: bool) -> None:
    """One snapshot without a terminal, with `once` or as JSON; else screens until Ctrl-C.

    Raises CallFailed where no node answers at first; one that is lost later is looked for again.
    """

    def read() -> top_view.Reading:
        return reading(settings)

    if as_json or once or not sys.stdout.isatty():
        before = read()
        time.sleep(_EVERY_S)  # rates are between two readings
        told = top_view.snapshot(read(), before)
        print(json.dumps(told, indent=2) if as_json else top_view.shown(told, _clock()))
        return
    first = read()
    try:
        _live(screens(read, first, _clock, _width))
    except KeyboardInterrupt:  # the way to end it
        return


def reading(settings: "ClientSettings") -> top_view.Reading:
    """Asks the node, which is located each time: after a restart it may have another port."""
    endpoint = locate(settings)
    return top_view.Reading(
        cluster=call(endpoint, "/v1/cluster"),
        placements=call(endpoint, "/v1/placements").get("data", []),
        answered=call(endpoint, "/v1/mtp/stats").get("models", {}),
        metrics=read_text(endpoint, "/metrics"),
        at=time.monotonic(),
    )


def screens(
    read: Read, first: top_view.Reading, clock: Callable[[], str], width: Width
) -> Iterator[str]:
    """A text for each reading. While none succeeds: the last one, its time and the trouble."""
    before, told, at = first, top_view.snapshot(first, None), clock()
    yield top_view.shown(told, at, width=width())
    lost = False
    while True:
        try:
            now = read()
        except CallFailed as error:
            lost = True
            trouble = f"{error.what}; asked again, this is of {at}"
            yield top_view.shown(told, at, trouble, width())
            continue
        told, at = top_view.snapshot(now, None if lost else before), clock()
        before, lost = now, False
        yield top_view.shown(told, at, width=width())


def _live(texts: Iterator[str]) -> None:
    from rich.live import Live
    from rich.text import Text

    with Live(screen=True, auto_refresh=False) as live:
        for text in texts:
            live.update(Text(text, no_wrap=True, overflow="crop"), refresh=True)
            time.sleep(_EVERY_S)


def _width() -> int:
    return shutil.get_terminal_size().columns


def _clock() -> str:
    return datetime.now().strftime("%H:%M:%S")
