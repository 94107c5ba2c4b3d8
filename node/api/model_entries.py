"""Entries of `GET /v1/models`, with the fields of OpenAI's and of Anthropic's clients in one."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from .dialects import ANTHROPIC_HEADER

Json = Mapping[str, Any]


def model_entry(entry: Json, headers: Mapping[str, str] | None = None) -> dict[str, Any]:
    """`entry`: with `id`, and `created` in seconds since 1970. `headers`: the request's.

    Anthropic's clients have another type for `capabilities`, so theirs have none.
    """
    made = datetime.fromtimestamp(int(entry.get("created") or 0), UTC)
    context = entry.get("context_length")
    return {
        **entry,
        "type": "model",
        "display_name": str(entry["id"]),
        "created_at": made.isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": context,
        "max_tokens": context,
    } | ({"capabilities": None} if ANTHROPIC_HEADER in (headers or {}) else {})


def model_list(listed: Json, headers: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The whole list on one page. `listed`: with the entries as `data`."""
    entries = [model_entry(entry, headers) for entry in listed["data"]]
    ends = (entries[0]["id"], entries[-1]["id"]) if entries else (None, None)
    page = {"has_more": False, "first_id": ends[0], "last_id": ends[1]}
    return {**listed, "data": entries, **page}
