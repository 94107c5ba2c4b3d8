"""Models in the shape of each API: OpenAI's and Anthropic's in one, and Ollama's."""

import hashlib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from ..http.dialects import ANTHROPIC_HEADER

Json = Mapping[str, Any]
OLLAMA_VERSION: Final = "0.11.0"
"""The version of Ollama whose API this is: 0.11 brought levels of `think`. Clients compare it with
the version that they need (VS Code's Copilot: 0.6.4). The node's own version is at `/version`."""
_OLLAMA_OPTIONS: Final = {"repetition_penalty": "repeat_penalty"}
_NEVER: Final = "9999-12-31T23:59:59Z"


def model_entry(entry: Json, headers: Mapping[str, str] | None = None) -> dict[str, Any]:
    """`entry` has an `id`, and `created` in seconds since 1970. `headers` are the request's.

    Anthropic's clients have another type for `capabilities`, so they get null.
    """
    created = datetime.fromtimestamp(int(entry.get("created") or 0), UTC)
    context = entry.get("context_length")
    return {
        **entry,
        "type": "model",
        "display_name": str(entry["id"]),
        "created_at": created.isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": context,
        "max_tokens": context,
    } | ({"capabilities": None} if ANTHROPIC_HEADER in (headers or {}) else {})


def model_list(listed: Json, headers: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The whole list on one page; `listed` has the entries as `data`."""
    entries = [model_entry(entry, headers) for entry in listed["data"]]
    ends = (entries[0]["id"], entries[-1]["id"]) if entries else (None, None)
    page = {"has_more": False, "first_id": ends[0], "last_id": ends[1]}
    return {**listed, "data": entries, **page}


def with_profiles(models: Sequence[Json], profiles: Mapping[str, Json]) -> list[Json]:
    """The entries of the models with those of an entry node's profiles, as `ProfileFile` lists
    them, in the places of models of the same names."""
    by_id = {str(entry["id"]): entry for entry in models}
    others = [entry for name, entry in by_id.items() if name not in profiles]
    return [*others, *(_profile(name, each, by_id) for name, each in profiles.items())]


def _profile(name: str, profile: Json, models: Mapping[str, Json]) -> Json:
    if (of := str(profile.get("profile_of"))) in models:
        return {**models[of], "id": name, **profile}
    why = f"its model {of} is not on the cluster's disks; `exo-node models` lists those"
    bare = {"object": "model", "created": 0, "owned_by": "exo-node"}
    return {"id": name, **bare, "loaded": False, "downloaded": False, "error": why, **profile}


def ollama_tag(entry: Json) -> dict[str, Any]:
    """An entry of `/api/tags`, made from one of `GET /v1/models`."""
    name = str(entry["id"])
    return {
        "name": name,
        "model": name,
        "modified_at": _modified_at(entry),
        "size": entry.get("size_bytes") or 0,
        "digest": entry.get("digest") or hashlib.sha256(name.encode()).hexdigest(),
        "details": _details(entry),
        "capabilities": _capabilities(entry),
    }


def ollama_loaded(entry: Json, nodes: Sequence[Json]) -> dict[str, Any]:
    """An entry of `/api/ps`. `nodes` are those of `GET /v1/cluster`, with the stages' memory."""
    stages = [
        (node.get("backend") != "cpu", stage["weight_bytes"] + stage["cache_bytes"])
        for node in nodes
        for stage in node.get("stages", ())
        if stage["model"] == entry["id"]
    ]
    return ollama_tag(entry) | {
        "size": sum(size for _, size in stages) or entry.get("size_bytes") or 0,
        "size_vram": sum(size for on_gpu, size in stages if on_gpu),
        "expires_at": _expires_at(entry),
        "context_length": _context(entry),
    }


def ollama_shown(entry: Json) -> dict[str, Any]:
    """The answer of `/api/show`. The template is empty, because the node applies it itself."""
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
        "capabilities": _capabilities(entry),
        "template": "",
        "parameters": _parameters(entry),
    }


def _parameters(entry: Json) -> str:
    """Ollama's lines of options and values, as far as the card or the publisher sets them."""
    sampling: Mapping[str, Json] = entry.get("sampling") or {}
    return "\n".join(
        f"{_OLLAMA_OPTIONS.get(name, name):<30} {each['value']:g}"
        for name, each in sampling.items()
        if each["source"] != "default"
    )


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
    """The count in Ollama's notation: 27.4B, 751M."""
    if count >= 10**9:
        return f"{count / 10**9:.1f}B"
    return f"{count / 10**6:.0f}M" if count else ""


def _capabilities(entry: Json) -> list[str]:
    """Ollama's words. An embedder has `embedding` beside the word of all other lists."""
    own = entry.get("capabilities") or ()
    if "embeddings" in own:
        return ["embedding", "embeddings"]
    return ["completion", *(name for name in ("tools", "thinking", "vision") if name in own)]


def _context(entry: Json) -> int:
    """Tokens of context; of a model that is not loaded, those that a load would have now."""
    fits: Json | None = None if entry.get("loaded") else entry.get("fits")
    planned: int | None = fits.get("context_length") if fits else None
    return planned or entry.get("context_length") or 0


def _modified_at(entry: Json) -> str:
    return datetime.fromtimestamp(int(entry.get("created", 0)), UTC).isoformat()


def _expires_at(entry: Json) -> str:
    """When the model unloads; clients want a time even if it stays until a user unloads it."""
    left_s = entry.get("unloads_in_s")
    if left_s is None:
        return _NEVER
    at = datetime.now(UTC) + timedelta(seconds=float(left_s))
    return at.isoformat().replace("+00:00", "Z")
