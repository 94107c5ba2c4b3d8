"""Models in the shape of Ollama's `/api/tags`, `/api/ps` and `/api/show`."""

import hashlib
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from .operations_api import Json

VERSION: Final = "0.11.0"
"""Ollama's version whose API this is: 0.11 brought levels of `think`. Clients compare it with what
they need (VS Code's Copilot with 0.6.4). The node's own version is at `/version`."""
_STAYS: Final = "9999-12-31T23:59:59Z"


def tag(entry: Json) -> dict[str, Any]:
    """`entry`: of `GET /v1/models`."""
    name = str(entry["id"])
    return {
        "name": name,
        "model": name,
        "modified_at": _modified_at(entry),
        "size": entry.get("size_bytes") or 0,
        "digest": entry.get("digest") or hashlib.sha256(name.encode()).hexdigest(),
        "details": _details(entry),
    }


def loaded(entry: Json, nodes: Sequence[Json]) -> dict[str, Any]:
    """`nodes`: of `GET /v1/cluster`, whose stages say how much memory the model takes."""
    taken = [
        (node.get("backend") != "cpu", stage["weight_bytes"] + stage["cache_bytes"])
        for node in nodes
        for stage in node.get("stages", ())
        if stage["model"] == entry["id"]
    ]
    return tag(entry) | {
        "size": sum(size for _, size in taken) or entry.get("size_bytes") or 0,
        "size_vram": sum(size for on_gpu, size in taken if on_gpu),
        "expires_at": _expires_at(entry),
        "context_length": _context(entry),
    }


def shown(entry: Json) -> dict[str, Any]:
    """One model with its capabilities; a template is not shown, since the node applies it."""
    family = entry.get("model_type") or "unknown"
    return {
        "details": _details(entry),
        "model_info": {
            "general.architecture": family,
            "general.basename": str(entry["id"]).rpartition("/")[2],
            "general.parameter_count": entry.get("parameters") or 0,
            f"{family}.context_length": _context(entry),
        },
        "modified_at": _modified_at(entry),
        "capabilities": ["completion", *_capabilities(entry)],
        "template": "",
        "parameters": "",
    }


def _details(entry: Json) -> dict[str, Any]:
    family = entry.get("model_type") or ""
    return {
        "parent_model": entry.get("variant_of") or "",
        "format": "safetensors",
        "family": family,
        "families": [family] if family else [],
        "parameter_size": _parameter_size(entry.get("parameters") or 0),
        "quantization_level": entry.get("format") or "",
    }


def _parameter_size(count: int) -> str:
    """As Ollama writes it: 27.4B, 751M."""
    if count >= 10**9:
        return f"{count / 10**9:.1f}B"
    return f"{count / 10**6:.0f}M" if count else ""


def _capabilities(entry: Json) -> list[str]:
    return [name for name in ("tools", "thinking") if name in (entry.get("capabilities") or ())]


def _context(entry: Json) -> int:
    """Tokens: of a model that is not loaded those that a load would have now."""
    fits: Json | None = None if entry.get("loaded") else entry.get("fits")
    planned: int | None = fits.get("context_length") if fits else None
    return planned or entry.get("context_length") or 0


def _modified_at(entry: Json) -> str:
    return datetime.fromtimestamp(int(entry.get("created", 0)), UTC).isoformat()


def _expires_at(entry: Json) -> str:
    """Clients want a time, also of what stays until somebody unloads it."""
    left_s = entry.get("unloads_in_s")
    if left_s is None:
        return _STAYS
    at = datetime.now(UTC) + timedelta(seconds=float(left_s))
    return at.isoformat().replace("+00:00", "Z")
