"""Parts of a message that no model of this node can read: pictures, sound and files.

In the user's latest turn they are refused, or the model would answer as if it had seen them. In
results of tools and in earlier turns a note replaces a picture: the user did not ask for the
former, and clients repeat a refused turn with each one that follows.
"""

from collections.abc import Mapping, Sequence
from typing import Final, cast

from ...placement.errors import UnsupportedParameter

_PICTURES: Final = ("image", "image_url", "input_image", "images")
_NAMES: Final[Mapping[str, str]] = {
    **dict.fromkeys(_PICTURES, "see pictures"),
    **dict.fromkeys(("document", "file", "input_file"), "read files"),
    **dict.fromkeys(("audio", "input_audio"), "hear sound"),
    **dict.fromkeys(("video", "video_url", "input_video"), "see films"),
}
"""The verb of a refusal by a part's type or a field's name, in any dialect."""
_NOTE: Final = "[an image was here; this node reads text only]"


def refusal_of(kind: str) -> str | None:
    """Why the user's latest turn may not have the part, after its field's name; None: it may."""
    if kind not in _NAMES:
        return None
    return f"asks the model to {_NAMES[kind]}, which it cannot; send text, or leave that part out"


def without_earlier_pictures(messages: object) -> object:
    """Raw messages of chat completions, with a note for each picture outside the latest user turn.

    A value that is not a list of messages is returned unchanged.
    """
    if not isinstance(messages, list):
        return messages
    turns = cast("list[object]", messages)
    roles = [str(_fields(turn).get("role")) for turn in turns]
    latest = latest_user_turn(roles)
    return [turn if i == latest else _with_notes(turn) for i, turn in enumerate(turns)]


def has_note(text: str | None) -> bool:
    """Whether a picture of the message was replaced."""
    return _NOTE in (text or "")


def _with_notes(turn: object) -> object:
    fields = _fields(turn)
    content = fields.get("content")
    if not isinstance(content, list):
        return turn
    parts = cast("list[object]", content)
    note = {"type": "text", "text": _NOTE}
    parts = [note if _fields(part).get("type") in _PICTURES else part for part in parts]
    return {**fields, "content": parts}


def _fields(value: object) -> Mapping[str, object]:
    return cast("Mapping[str, object]", value) if isinstance(value, dict) else {}


def latest_user_turn(roles: Sequence[str]) -> int:
    """The index of the user's latest turn, or -1. `roles` are those of all messages, in order."""
    return max((number for number, role in enumerate(roles) if role == "user"), default=-1)


def refuse_unreadable(kind: str, at: str, prefix: str = "") -> None:
    """Raises UnsupportedParameter for a part of that type in the user's latest turn.

    `prefix` goes before the message, for dialects whose clients look for a sentence.
    """
    if (why := refusal_of(kind)) is not None:
        raise UnsupportedParameter(f"{prefix}'{at}' {why}", param=at)


def note_of(kind: str) -> str:
    """The text that replaces such a part of a tool's result; "" for other types."""
    return _NOTE if kind in _PICTURES else ""
