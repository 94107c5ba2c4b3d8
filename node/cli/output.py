"""Tables, answers and notes on the terminal.

Text comes from models and other machines, so it may not send a terminal escape sequences. Fields
that another version of the node leaves out show as `-`.
"""

import json
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import typer

from ...placement.errors import InvalidSettings
from ..machine.log import escape_controls
from ..machine.own_command import typable
from .client import Comment

Json = Mapping[str, Any]
"""An object of the API."""

_UNLIMITED: Final = 1_000_000
_FIRST_LOAD: Final = " (the first load on a machine also times layers; later ones are shorter)"
_OF_A_LOADED_MODEL: Final = ("prefill", "resuming")
"""Beginnings of the progress of an answer whose model was loaded before it."""


def terminal_width() -> int | None:
    """The columns of the terminal; None where stdout is none, for which nothing is wrapped."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def table(
    header: Sequence[str], rows: Iterable[Sequence[str]], *, width: int | None = None
) -> list[str]:
    """The lines of a table of at most `width` columns; the widest cells are wrapped.

    Without `width` no cell is. Cells may hold any text.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=None, pad_edge=False, header_style="")
    for name in header:
        grid.add_column(Text(name), overflow="fold")
    for row in rows:
        grid.add_row(*(Text(escape_controls(cell)) for cell in row))
    console = Console(width=width or _UNLIMITED, height=1, color_system=None)
    with console.capture() as captured:
        console.print(grid)
    return [line.rstrip() for line in captured.get().removesuffix("\n").split("\n")]


def print_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Prints a table that is as wide as the terminal at most."""
    print("\n".join(table(header, rows, width=terminal_width())))


def joined(lines: Iterable[str]) -> str:
    """One text of lines, with commands as they can be typed here, and no control characters."""
    return "\n".join(escape_controls(typable(line)) for line in lines)


def text_of(value: object) -> str:
    """The text of a field, `-` for one that is missing."""
    return "-" if value is None else str(value)


def texts(entry: Json, *fields: str) -> tuple[str, ...]:
    return tuple(text_of(entry.get(field)) for field in fields)


def share(totals: Json, part: str, whole: str) -> str:
    """`67 %`, or `-` where the whole is 0 or missing."""
    count = totals.get(whole)
    return f"{100 * (totals.get(part) or 0) / count:.0f} %" if count else "-"


def caches_text(placement: Json) -> str:
    """The bits of a placement's quantised caches; empty where they are not quantised."""
    bits = placement.get("kv_bits")
    return f", caches of {bits} bits" if bits else ""


def size(value: object) -> str:
    """Bytes in decimal units, as disks are sold."""
    if not isinstance(value, int):
        return "-"
    return f"{value / 1e9:.1f} GB" if value >= 10**8 else f"{value / 1e6:.0f} MB"


def duration(seconds: float) -> str:
    """A time that something will take, in seconds, minutes or hours."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def minute(at: int) -> str:
    """A time in Unix seconds to the minute, in UTC; `?` for one beyond all calendars."""
    try:
        return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%MZ")
    except (OverflowError, ValueError):
        return "?"


def print_json(value: Json) -> None:
    print(json.dumps(value, indent=2))


def print_result(value: Json, sentence: str, *, as_json: bool) -> None:
    """Prints what a command did: an object for a program, or a sentence for a person."""
    print_json(value) if as_json else note(sentence)


def note(*lines: str) -> None:
    """Prints lines for a person to stderr, which may quote models and other machines."""
    print(joined(lines), file=sys.stderr, flush=True)


def confirm(question: str, refusal: str = "") -> None:
    """Asks on the terminal; raises typer.Abort for a no.

    Raises InvalidSettings where there is no terminal to ask on.
    """
    if not sys.stdin.isatty():
        raise InvalidSettings(refusal or f"{question} If so: add --yes", param="--yes")
    _ = typer.confirm(typable(question), abort=True, err=True)


# ---------------------------------------------------------------------------- answers


def print_answer(events: Iterable[dict[str, Any] | Comment]) -> Json | None:
    """Writes a stream's deltas to stdout as they come; returns the final stats, if any came."""
    stats: Json | None = None
    last, progress, noted = "\n", StatusLine(), sys.stderr.isatty()
    try:
        for event in events:
            if isinstance(event, Comment):
                if not noted and event.text and not event.text.startswith(_OF_A_LOADED_MODEL):
                    note(f"loading the model: {event.text}{_FIRST_LOAD}")
                    noted = True  # a file of all steps would be long
                progress.show(event.text, below=last != "\n")
                continue
            if not _is_heartbeat(event):
                progress.clear()
            stats = event.get("generation_stats") or stats
            for choice in event.get("choices", []):
                text: str = choice.get("delta", {}).get("content") or ""
                last = text[-1:] or last
                print(_for_stdout(text), end="", flush=True)
    finally:
        if last != "\n":
            print(flush=True)
    return stats


def _is_heartbeat(event: Json) -> bool:
    """Whether a chunk of a stream has no content; then the progress line stays on the screen."""
    choices: Sequence[Json] = event.get("choices") or ()
    return bool(choices) and not any(c.get("delta") or c.get("finish_reason") for c in choices)


def stats_line(stats: Json) -> str:
    """`generation_stats` in one line."""
    kind = text_of(stats.get("drafter_kind"))
    if kind == "none":
        parts = [f"drafter none ({stats.get('drafting_reason') or 'no reason given'})"]
    else:
        accepted, proposed = stats.get("accepted_draft_tokens"), stats.get("proposed_draft_tokens")
        parts = [f"drafter {kind}", f"K {text_of(stats.get('num_draft_tokens'))}"]
        parts.append(f"accepted {text_of(accepted)}/{text_of(proposed)}")
        if stats.get("lookup_rounds"):
            parts.append(f"copied {text_of(stats.get('lookup_accepted_tokens'))}")
    parts.append(f"{stats.get('generation_tps') or 0:.1f} tok/s")
    if load_s := stats.get("load_s"):
        parts.append(f"loaded in {load_s:.1f} s")
    parts.append(f"TTFT {stats.get('time_to_first_token_s') or 0:.2f} s")
    if cached := stats.get("cached_tokens"):
        parts.append(f"{text_of(cached)} prompt tokens cached")
    if stats.get("batched_tokens"):
        parts.append(f"{text_of(round(stats.get('batch_size') or 1, 1))} requests a step")
    if resumes := stats.get("resumes"):
        exact = "exact" if stats.get("resume_exact") else "not exact"
        parts.append(f"resumed {text_of(resumes)}x, {exact}")
    return escape_controls(", ".join(parts))


class StatusLine:
    """One line of a terminal that each text overwrites."""

    def __init__(self) -> None:
        self._width = 0

    def show(self, text: str, *, below: bool = False) -> None:
        """`below`: the answer's line is incomplete, so the progress begins on the next one."""
        if not text or not sys.stderr.isatty():
            return
        begin = "\n" if below and not self._width else "\r"
        text = escape_controls(text)
        print(f"{begin}{text.ljust(self._width)}", end="", file=sys.stderr, flush=True)
        self._width = len(text)

    def end(self) -> None:
        """Leaves the line as it is, and begins another."""
        if self._width:
            print(file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self._width:
            print(f"\r{' ' * self._width}\r", end="", file=sys.stderr, flush=True)
        self._width = 0


def _for_stdout(text: str) -> str:
    return escape_controls(text, keep="\n\t") if sys.stdout.isatty() else text
