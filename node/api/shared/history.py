"""The past of a conversation, in every dialect: read as far as it can be, and repaired.

A turn that has happened asks for nothing, and a client sends it again with each that follows: a
refusal would end the conversation. What asks for something is a `StrictBody`, or a
`TolerantBody` where clients send new fields with every release.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Self, cast

from pydantic import ConfigDict, ModelWrapValidatorHandler, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError

from ....placement.errors import InvalidRequest
from ...machine.json_size import Room
from ..http.bodies import MAX_HISTORY, TolerantBody
from ..http.strict_json import decode, encode
from .tool_schema import call_for_template

MAX_MESSAGES: Final = 4096
"""The limit of messages in one body."""
NOTHING_TO_READ: Final = "'messages' has no message that this node can read"
_MAX_DROPPED: Final = 64
_ROLES: Final[Mapping[str, str]] = {
    "assistant": "assistant",
    "developer": "system",
    "function": "tool",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
    "user": "user",
}
"""The roles of chat templates by those of clients."""


class HistoryBody(TolerantBody):
    """A part of the past. Every field may be missing; unusable and unknown ones are `dropped`.

    More than MAX_HISTORY of them in one body are refused all the same.
    """

    model_config = ConfigDict(extra="ignore")

    text_field: ClassVar[str] = ""
    """The field that a bare text stands for."""
    other_names: ClassVar[Mapping[str, str]] = {}
    """The fields' names by what other servers call them."""
    unused_fields: ClassVar[frozenset[str]] = frozenset()
    """Fields that are expected and change no prompt; they are dropped and not named."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing of it could be read."""
        return all(getattr(self, name) is None for name in type(self).model_fields)

    def kind_of(self, type: str | None, kinds: Mapping[str, str]) -> str:
        """The type, or the one that a field implies, or "". `kinds`: the types by fields.

        The last one is that of whatever else it has.
        """
        if type or self.is_empty:
            return type or ""
        named = (kind for name, kind in kinds.items() if getattr(self, name, None) is not None)
        return next(named, [*kinds.values()][-1])

    @model_validator(mode="wrap")
    @classmethod
    def _read(
        cls, value: Any, handler: ModelWrapValidatorHandler[Self], info: ValidationInfo
    ) -> Self:
        _count(info.context)
        if isinstance(value, cls):
            return handler(value)
        if isinstance(value, str) and cls.text_field:
            value = {cls.text_field: value}
        if isinstance(value, dict):
            fields, dropped = cls._known_fields(cast(dict[str, Any], value))
        else:
            fields, dropped = dict[str, Any](), [""]
        body = handler(fields)
        dropped += body.dropped
        if value and body.is_empty and not dropped:
            dropped.append("")
        body._dropped = tuple(dropped[:_MAX_DROPPED])
        return body

    @classmethod
    def _known_fields(cls, value: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """The schema's fields that have a value, and the names of the unknown ones."""
        fields, dropped = dict[str, Any](), list[str]()
        for name, each in value.items():
            own = cls.other_names.get(name, name)
            if each is None or each in ([], {}) or name in cls.unused_fields:
                continue
            if own in cls.model_fields and (own == name or value.get(own) in (None, each)):
                fields[own] = each
            else:
                dropped.append(name)
        return fields, dropped

    @classmethod
    def _is_droppable(cls, value: object, kinds: set[str]) -> bool:
        return "too_long" not in kinds


def _count(room: dict[str, int] | None) -> None:
    """Counts one more object. Raises for too many: each costs more than its bytes do."""
    if room is None:
        return
    room["history"] -= 1
    if room["history"] < 0:
        raise PydanticCustomError(
            "too_long",
            "is beyond the {most} messages, parts and calls that one request may have; send less "
            "of the conversation",
            {"most": MAX_HISTORY},
        )


def as_text(value: Any) -> Any:
    """Text and lists as they are, a part as a list of it; any other JSON, which is how some clients
    send results of tools, as its text."""
    match value:
        case None | str() | list():
            return cast(object, value)
        case {"type": "text"}:
            return [value]
        case _:
            return encode(value).decode()


def role_of(role: str | None, *, calls: bool = False, answers: bool = False) -> str:
    """The template's role. `calls`, `answers`: whether the message has calls, or is a result."""
    own = _ROLES.get((role or "").lower())
    return own or ("assistant" if calls else "tool" if answers else "user")


@dataclass(slots=True)
class History:
    """One reading of a conversation. `ignored`: the names of what was dropped, to be appended to.

    `refusals`: the beginnings of errors about the user's latest turn, by a part's type.
    """

    ignored: list[str]
    refusals: Mapping[str, str] = field(default_factory=dict[str, str])
    _room: Room = field(default_factory=Room)
    """The room for JSON texts of all calls together."""
    _open_calls: list[str] = field(default_factory=list[str])
    """The ids of calls that no result has answered so far."""

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(self.ignored))

    def check_role(self, role: str | None, at: str) -> None:
        """Names a role that no template has."""
        if role is not None and role.lower() not in _ROLES:
            self.ignored.append(f"{at}.role ({role[:32]})")

    def call(
        self, id: str | None, name: str | None, arguments: Any, at: str, field: str = "arguments"
    ) -> dict[str, Any]:
        """A call for a chat template. `arguments`: an object, or its text, from `field` of `at`."""
        self._open_calls.append(id or "")
        if not name:
            self.ignored.append(f"{at}.name (missing)")
        return call_for_template(id, name or "unknown", self._arguments(arguments, f"{at}.{field}"))

    def result_id(self, id: str | None) -> str:
        """The id of the call that a result answers: its own, or of the first that has no result."""
        if id is None:
            return self._open_calls.pop(0) if self._open_calls else ""
        if id in self._open_calls:
            self._open_calls.remove(id)
        return id

    def _arguments(self, value: Any, at: str) -> dict[str, Any]:
        """Arguments as an object, which every template reads.

        A call that was cut has a text that is none; the object then has the text.
        """
        if value is None or (isinstance(value, str) and value.strip() in ("", "null")):
            return {}
        parsed = self._parsed(value) if isinstance(value, str) else value
        if isinstance(parsed, dict):
            return cast(dict[str, Any], parsed)
        self.ignored.append(f"{at} (no JSON object; the model reads the text)")
        return {"arguments": value if isinstance(value, str) else encode(value).decode()}

    def _parsed(self, text: str) -> Any:
        try:
            return decode(text.encode(), self._room)
        except (InvalidRequest, UnicodeEncodeError):
            return None
