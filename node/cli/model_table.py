"""Tables of models on the terminal, from entries of `GET /v1/models`."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..machine.log import escape_controls
from .output import table, text_of


def on_disk(entries: Sequence[Mapping[str, Any]]) -> str:
    """One line a model: size, format, whether it fits, its native MTP and where it is."""
    rows = [
        (
            text_of(entry.get("id")),
            size(entry.get("size_bytes")),
            text_of(entry.get("format")),
            fits(entry),
            "yes" if entry.get("loaded") else "no",
            _mtp(entry),
        )
        for entry in entries
    ]
    head = ("MODEL", "SIZE", "FORMAT", "FITS", "LOADED", "NATIVE MTP")
    return _joined(table(head, rows))


def catalogue(entries: Sequence[Mapping[str, Any]]) -> str:
    """One line a card."""
    rows = [
        (
            text_of(entry.get("id")),
            size(entry.get("size_bytes")),
            text_of(entry.get("format")),
            fits(entry),
            "yes" if entry.get("downloaded") else "no",
        )
        for entry in entries
    ]
    return _joined(table(("MODEL", "SIZE", "FORMAT", "FITS", "ON DISK"), rows))


def size(value: object) -> str:
    """Bytes in decimal units, as disks are sold."""
    if not isinstance(value, int):
        return "-"
    return f"{value / 1e9:.1f} GB" if value >= 10**8 else f"{value / 1e6:.0f} MB"


def fits(entry: Mapping[str, Any]) -> str:
    """Where the model would run if nothing else did."""
    fit: Mapping[str, Any] | None = entry.get("fits")
    match fit and fit.get("nodes"):
        case None:
            return "-"
        case 0:
            return f"no: needs {size(fit and fit.get('needed_bytes'))}"
        case 1:
            return "yes"
        case nodes:
            return f"on {nodes} nodes"


def _mtp(entry: Mapping[str, Any]) -> str:
    if entry.get("error"):
        return f"cannot be used: {entry['error']}"
    mtp: Mapping[str, Any] | None = entry.get("native_mtp")
    if mtp is not None and not mtp.get("enabled", True):
        return f"off: {mtp.get('reason') or 'its weights are missing'}"
    return text_of(entry.get("mtp"))


def _joined(lines: Sequence[str]) -> str:
    return "\n".join(escape_controls(line) for line in lines)
