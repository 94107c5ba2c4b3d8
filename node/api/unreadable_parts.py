"""Parts of a message that no model of this node can read: sound, films and files.

They are refused in the user's latest turn, or the model would answer as if it knew them.
"""

from collections.abc import Mapping
from typing import Final

from ...placement.errors import UnsupportedParameter

_NAMES: Final[Mapping[str, str]] = {
    **dict.fromkeys(("document", "file", "input_file"), "read files"),
    **dict.fromkeys(("audio", "input_audio"), "hear sound"),
    **dict.fromkeys(("video", "video_url", "input_video"), "see films"),
}
"""The verb of a refusal by a part's type or a field's name, in any dialect."""


def refusal_of(kind: str) -> str | None:
    """Why the user's latest turn may not have the part, after its field's name; None: it may."""
    if kind not in _NAMES:
        return None
    return f"asks the model to {_NAMES[kind]}, which it cannot; send text, or leave that part out"


def refuse_unreadable(kind: str, at: str, prefix: str = "") -> None:
    """Raises UnsupportedParameter for a part of that type in the user's latest turn.

    `prefix` goes before the message, for dialects whose clients look for a sentence.
    """
    if (why := refusal_of(kind)) is not None:
        raise UnsupportedParameter(f"{prefix}'{at}' {why}", param=at)
