"""An answer's text as the pieces that a client is told: content, reasoning, calls of tools."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from ...proto import peer_pb2 as pb
from ..text.channels import AnswerFormat, Channels, Segment
from ..text.tool_calls import Call

Parse = Callable[[str], Awaitable[Sequence[Call] | None]]
"""The calls in a text, None where it holds none."""

_LINE_BREAKS: Final = "\n\r"


class AnswerPieces:
    """One answer. What an earlier attempt handed out goes through it too, so that it is where that
    attempt was.

    Line breaks round reasoning and calls are the template's own and belong to neither.
    """

    def __init__(self, format: AnswerFormat, prompt: Sequence[int], parse: Parse | None) -> None:
        """`parse` None: the request declares no tools."""
        chosen = format if parse is not None else format.without_calls()
        self._plain = chosen.plain
        self._channels = Channels(chosen, chosen.begins_in(prompt))
        self._parse = parse
        self._breaks = ""
        """At the end of the content so far: dropped where a call follows."""
        self._trims = False
        """Whether the content begins anew, so that its first line breaks are dropped."""
        self._thought = False
        self._waiting = ""
        """Line breaks at the end of the reasoning so far."""

    async def said(self, text: str) -> list[pb.Piece]:
        """The pieces that became certain with `text`."""
        if self._plain:
            return [pb.Piece(text=text)] if text else []
        return await self._pieces(self._channels.feed(text), over=False, stopped=False)

    async def finish(self, text: str, *, stopped: bool) -> list[pb.Piece]:
        """With the last text; `stopped`: the model or a stop string ended the answer."""
        pieces = await self.said(text)
        if self._plain:
            return pieces
        pieces += await self._pieces(self._channels.finish(), over=True, stopped=stopped)
        breaks, self._breaks = self._breaks, ""
        return [*pieces, pb.Piece(text=breaks)] if breaks else pieces

    async def _pieces(
        self, segments: Sequence[Segment], *, over: bool, stopped: bool
    ) -> list[pb.Piece]:
        pieces: list[pb.Piece] = []
        for segment in segments:
            match segment.state:
                case "reasoning":
                    pieces += self._reasoning(segment)
                case "content":
                    pieces += self._content(segment.text)
                case "call":
                    pieces += await self._calls(segment, certain=not over or stopped)
                case "header":
                    # A model that does not keep to its own format: what it says is not lost.
                    stray = segment.text if over and "<|" not in segment.text else ""
                    pieces += self._content(stray)
        return pieces

    def _reasoning(self, segment: Segment) -> list[pb.Piece]:
        self._trims = True
        text = segment.text
        if not self._thought:
            text = text.lstrip(_LINE_BREAKS)
        self._thought = self._thought or bool(text)
        kept = text.rstrip(_LINE_BREAKS)
        said, breaks = self._waiting + kept, text[len(kept) :]
        if not kept:
            said, breaks = "", self._waiting + text
        self._waiting = "" if segment.closed else breaks
        self._thought = self._thought and not segment.closed
        return [pb.Piece(reasoning=said)] if said else []

    def _content(self, text: str) -> list[pb.Piece]:
        if self._trims:
            text = text.lstrip(_LINE_BREAKS)
        if not text:
            return []
        self._trims = False
        kept = text.rstrip(_LINE_BREAKS)
        said, self._breaks = self._breaks + kept, text[len(kept) :]
        if not kept:
            self._breaks, said = said + text, ""
        return [pb.Piece(text=said)] if said else []

    async def _calls(self, segment: Segment, *, certain: bool) -> list[pb.Piece]:
        """A call that was cut off may parse and still lack what was to come: it is content."""
        whole = segment.opened + segment.text + segment.closed
        calls: Sequence[Call] | None = None
        if certain and self._parse is not None:
            is_header = "<|message|>" in segment.opened
            calls = await self._parse(whole if is_header else segment.text)
        if calls is None:
            self._trims = False
            return self._content(whole)
        self._breaks, self._trims = "", True
        return [
            pb.Piece(call=pb.ToolCall(name=call.name, arguments=call.arguments)) for call in calls
        ]
