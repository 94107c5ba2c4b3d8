"""The input items of a stored response, as `GET /v1/responses/{id}/input_items` lists them."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from ....placement.errors import InvalidRequest
from ...responses.tables import ItemPlace
from ..http.routes import Schema
from ..http.strict_json import encode

MAX_LIMIT: Final = 100
_DEFAULT_LIMIT: Final = 20
PAGE_QUERY: Final[Mapping[str, Schema]] = {
    "after": {"type": "string"},
    "limit": {"type": "integer", "minimum": 1, "maximum": MAX_LIMIT},
    "order": {"enum": ["asc", "desc"]},
}
Order = Literal["asc", "desc"]
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Page:
    """The part of a list that a request asks for. `after`: the id of the item before it."""

    after: str | None
    limit: int
    order: Order

    @classmethod
    def of_query(cls, values: Mapping[str, str]) -> "Page":
        order: Order = "asc" if values.get("order") == "asc" else "desc"
        return cls(values.get("after"), int(values.get("limit", _DEFAULT_LIMIT)), order)

    def of(self, items: list[Json]) -> Json:
        """The list object of the items, which are in the order of the conversation."""
        ordered = items if self.order == "asc" else items[::-1]
        begin = 0
        if self.after is not None:
            # Clients may send an id twice: the last of them, or a client would never get past it.
            places = [n for n, item in enumerate(ordered) if item["id"] == self.after]
            if not places:
                raise InvalidRequest(
                    "'after' should be the id of an input item of this response", param="after"
                )
            begin = places[-1] + 1
        data = [public_item(item) for item in ordered[begin : begin + self.limit]]
        return {
            "object": "list",
            "data": data,
            "first_id": data[0]["id"] if data else None,
            "last_id": data[-1]["id"] if data else None,
            "has_more": begin + self.limit < len(ordered),
        }


def stored_items(items: list[Json], response: str) -> list[Json]:
    """Items as they are kept: each has an id, by which lists continue, and arguments are text,
    whose lists and objects no continuation has to parse."""
    prefix = response.replace("resp_", "msg_", 1)
    kept = list[Json]()
    for number, item in enumerate(items):
        own = {"id": item.get("id") or f"{prefix}_{number}"}
        if not isinstance(arguments := item.get("arguments"), str | None):
            own["arguments"] = encode(arguments).decode()
        kept.append({**item, **own})
    return kept


def place_of(item: str) -> ItemPlace | None:
    """The response that gave an item this id, and the part of it; None: no response did."""
    found = re.fullmatch(r"(item|msg)_([0-9a-f]+)_[0-9]+", item)
    if found is None:
        return None
    return ItemPlace(f"resp_{found[2]}", "output" if found[1] == "item" else "input")


def public_item(item: Json) -> Json:
    """An item with the fields that clients expect, which a request may leave out."""
    item = {"type": "message", **item}
    if item["type"] != "message" or not isinstance(item.get("content"), str):
        return item
    text: Json = {"type": "input_text", "text": item["content"]}
    if item.get("role") == "assistant":
        text = {"type": "output_text", "text": item["content"], "annotations": []}
    return {"status": "completed", **item, "content": [text]}
