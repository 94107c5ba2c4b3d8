"""Tables of models on the terminal, from entries of `GET /v1/models`."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..machine.log import escape_controls
from .output import size, table, text_of


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


def one(entry: Mapping[str, Any]) -> str:
    """A model in lines of name and value."""
    fit: Mapping[str, Any] = entry.get("fits") or {}
    card: Mapping[str, Any] = entry.get("card") or {}
    experts = card.get("num_experts")
    kind = f"{card.get('model_type')}, {card.get('num_layers')} layers"
    kind += f", {experts} experts" if experts else ""
    speed = fit.get("tokens_per_second")
    lines = {
        "model": text_of(entry.get("id")),
        "kind": kind,
        "size": f"{size(entry.get('size_bytes'))}, {text_of(entry.get('format'))}",
        "context": f"{text_of(entry.get('context_length'))} tokens",
        "fits": fits(entry) + (f", about {speed:g} tokens a second" if speed else ""),
        "computes in": _dtype(fit),
        "native MTP": text_of(entry.get("mtp")),
        "folder": text_of(entry.get("folder") or "not on this machine"),
    }
    others = [f"{v['repository']} ({v['bits']}-bit)" for v in entry.get("variants") or ()]
    if others:
        lines["quantised"] = ", ".join(others)
    return _joined([f"{name:<11} {text}" for name, text in lines.items()])


def _dtype(fit: Mapping[str, Any]) -> str:
    if not fit.get("dtype"):
        return "-"
    return f"{text_of(fit['dtype'])}: {text_of(fit.get('dtype_reason'))}"


def checked(found: Mapping[str, Any]) -> str:
    """The pre-flight of a checkpoint in lines."""
    head: Mapping[str, Any] = found["head"]
    mtp = head.get("reason")
    if head["found"]:
        bits = ", ".join(f"{each}-bit" for each in head["bits"]) or "not quantised"
        mtp = f"head found: {size(head['bytes'])}, {bits}, in {', '.join(head['files'])}"
    lines = {
        "files": f"good: {found['tensors']} tensors, {size(found['size_bytes'])}",
        "kind": f"{found['model_type']}, {found['format']}",
        "fits": fits(found),
        "native MTP": text_of(mtp),
    }
    return _joined([f"{name:<11} {text}" for name, text in lines.items()])


def recommended(here: Sequence[Mapping[str, Any]], cluster: Sequence[Mapping[str, Any]]) -> str:
    """Models that fit this machine, then those that its cluster has room for, and what to do."""
    if not (here or cluster):
        return "no model that exo-node has a card of fits; `exo-node models pull` gets any other"
    header = ("MODEL", "SIZE", "FORMAT", "RUNS ON", "TOKENS/S", "NATIVE MTP", "ON DISK")
    rows = [_recommended(entry, "this machine") for entry in here]
    rows += [_recommended(entry, "") for entry in cluster]
    first = next((e for e in (*here, *cluster) if not e.get("downloaded")), None)
    hint = f"`exo-node models pull {text_of(first.get('id'))}` gets it" if first else ""
    return _joined([*table(header, rows), "", "Speeds are estimates from memory bandwidth.", hint])


def _recommended(entry: Mapping[str, Any], where: str) -> tuple[str, ...]:
    fit: Mapping[str, Any] = entry["fits"]
    return (
        text_of(entry.get("id")),
        size(entry.get("size_bytes")),
        text_of(entry.get("format")),
        where or ("one node" if fit["nodes"] == 1 else f"{fit['nodes']} nodes"),
        text_of(fit.get("tokens_per_second")),
        "yes" if entry.get("drafts") else "no",
        "yes" if entry.get("downloaded") else "no",
    )


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
    part = entry.get("partial_bytes")
    return text_of(entry.get("mtp")) + (f"; {size(part)} of it are here" if part else "")


def _joined(lines: Sequence[str]) -> str:
    return "\n".join(escape_controls(line) for line in lines)
