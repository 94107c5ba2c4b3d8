"""Finds stop strings in the content of one answer; reasoning and calls may contain them."""

from collections.abc import Sequence
from typing import Final

from .tools.channels import AnswerChannels, AnswerFormat, Segment, overlap

_LINE_BREAKS: Final = "\n\r"
_ALL_CONTENT: Final = AnswerFormat()


class StopStrings:
    """Passes on an answer's text as soon as it cannot belong to a stop string.

    Line breaks between reasoning or a call and the content are the template's, as in
    `runner/answer_pieces.py`: a stop string of line breaks must not end an answer before it begins.
    """

    def __init__(
        self, stop: Sequence[str], format: AnswerFormat = _ALL_CONTENT, prompt: Sequence[int] = ()
    ) -> None:
        """`format`: how the answer to `prompt` marks its content; by default it has no marks."""
        self._stop = tuple(stop)
        marks = bool(stop) and not format.plain
        self._channels = AnswerChannels(format, format.begins_in(prompt)) if marks else None
        self._pending = ""
        """The end of the content so far, which may begin a stop string."""
        self._trims = False
        """Whether the next line breaks come before the content."""
        self.match = ""
        """The stop string that ended the answer, if one did. Text after it is dropped."""

    def feed(self, text: str) -> str:
        if self._channels is None:
            return self._content(text)
        return "".join(self._text(segment) for segment in self._channels.feed(text))

    def finish(self) -> str:
        """The rest, at the end of the answer."""
        segments = [] if self._channels is None else self._channels.finish()
        rest = "".join(self._text(segment) for segment in segments)
        return rest if self.match else rest + self._flush()

    def _text(self, segment: Segment) -> str:
        if self.match:
            return ""
        if segment.state != "content":
            self._trims = self._trims or segment.state in ("reasoning", "call")
            return self._flush() + segment.text + segment.closed
        content = segment.text.lstrip(_LINE_BREAKS) if self._trims else segment.text
        self._trims = self._trims and not content
        text = segment.text[: len(segment.text) - len(content)] + self._content(content)
        if self.match or not segment.closed:
            return text
        return text + self._flush() + segment.closed

    def _content(self, text: str) -> str:
        text = self._pending + text
        places = [(at, stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if places:
            at, self.match = min(places)
            self._pending = ""
            return text[:at]
        cut = len(text) - max((overlap(text, stop) for stop in self._stop), default=0)
        self._pending = text[cut:]
        return text[:cut]

    def _flush(self) -> str:
        text, self._pending = self._pending, ""
        return text
