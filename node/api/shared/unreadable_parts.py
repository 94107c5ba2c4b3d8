"""Parts of a message that no model of this node can read: sound, films and files.

They are refused in the user's latest turn, or the model would answer as if it knew them. In
earlier turns and results of tools a note takes their place.
"""

from collections.abc import Mapping
from typing import Final

from ....placement.errors import UnsupportedParameter

_NAMES: Final[Mapping[str, tuple[str, str]]] = {
    **dict.fromkeys(("document", "file", "input_file"), ("read files", "a file")),
    **dict.fromkeys(("audio", "input_audio"), ("hear sound", "sound")),
    **dict.fromkeys(("video", "video_url", "input_video"), ("see films", "a film")),
}
"""The verb of a refusal and the noun of a note by a part's type, in any dialect."""


def note_of(kind: str) -> str | None:
    """The text that takes the place of a part of that type; None: it is readable, or unknown."""
    return f"[{_NAMES[kind][1]} was here; this node reads text only]" if kind in _NAMES else None


def refuse_unreadable(kind: str, at: str, prefix: str = "") -> None:
    """Refuses (UnsupportedParameter) a part of that type in the user's latest turn.

    `prefix` goes before the message, for dialects whose clients look for a sentence.
    """
    if kind in _NAMES:
        raise UnsupportedParameter(
            f"{prefix}'{at}' asks the model to {_NAMES[kind][0]}, which it cannot; send text, or "
            "leave that part out",
            param=at,
        )
