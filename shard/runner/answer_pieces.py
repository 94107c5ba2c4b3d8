"""Splits an answer's text into the pieces that a client gets: content, reasoning, tool calls."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from ...proto import peer_pb2 as pb
from ..text.tools.call_stream import CallStream
from ..text.tools.channels import AnswerChannels, AnswerFormat, Segment
from ..text.tools.tool_calls import Call, Tools

_LINE_BREAKS: Final = "\n\r"


Parse = Callable[[str], Awaitable[Sequence[Call] | None]]
"""Parses the tool calls in a text; None if there are none."""


class AnswerPieces:
    """Splits one answer into pieces. A resumed answer feeds the text of earlier attempts, too, to
    restore its state.

    Line breaks around reasoning and calls belong to the template and are dropped.
    """

    def __init__(
        self,
        format: AnswerFormat,
        prompt: Sequence[int],
        parse: Parse | None,
        *,
        tools: Tools,
        in_parts: bool = False,
    ) -> None:
        """`parse`: None if the request declares no tools. `in_parts`: calls are sent while they are
        being written, if their format allows."""
        chosen = format.with_tools(tools) if parse is not None else format.without_calls()
        self._plain, self._in_parts = chosen.plain, in_parts
        self._channels = AnswerChannels(chosen, chosen.begins_in(prompt))
        self._parse = parse
        self._tools = tools
        self._call: _CallText | None = None
        self._breaks = ""
        """Line breaks at the end of the content so far, which are dropped if a call follows."""
        self._trims = False
        """Whether new content begins, so that its first line breaks are dropped."""
        self._has_reasoning = False
        """Whether the current reasoning has text so far."""
        self._waiting = ""
        """Line breaks at the end of the reasoning so far."""

    async def feed(self, text: str) -> list[pb.Piece]:
        """The pieces that became certain with `text`."""
        if self._plain:
            return [pb.Piece(text=text)] if text else []
        pieces: list[pb.Piece] = []
        for segment in self._channels.feed(text):
            pieces += await self._pieces(segment)
        return pieces

    async def finish(self, text: str, *, stopped: bool) -> list[pb.Piece]:
        """The last pieces, with the last text. `stopped`: the model or a stop string ended the
        answer."""
        pieces = await self.feed(text)
        if self._plain:
            return pieces
        for segment in self._channels.finish(stopped=stopped):
            if segment.state == "header":
                # A model that violates its own format: its text is not dropped.
                pieces += self._content("" if "<|" in segment.text else segment.text)
            else:
                pieces += await self._pieces(segment)
        if self._call is not None:
            pieces += await self._call_end(ended=stopped)
        breaks, self._breaks = self._breaks, ""
        return [*pieces, pb.Piece(text=breaks)] if breaks else pieces

    async def _pieces(self, segment: Segment) -> list[pb.Piece]:
        match segment.state:
            case "reasoning":
                return self._reasoning(segment)
            case "content":
                return self._content(segment.text)
            case "call":
                return await self._called(segment)
            case "header":
                return []

    def _reasoning(self, segment: Segment) -> list[pb.Piece]:
        self._trims = True
        text = segment.text
        if not self._has_reasoning:
            text = text.lstrip(_LINE_BREAKS)
        self._has_reasoning = self._has_reasoning or bool(text)
        stripped = text.rstrip(_LINE_BREAKS)
        certain, breaks = self._waiting + stripped, text[len(stripped) :]
        if not stripped:
            certain, breaks = "", self._waiting + text
        self._waiting = "" if segment.closed else breaks
        self._has_reasoning = self._has_reasoning and not segment.closed
        return [pb.Piece(reasoning=certain)] if certain else []

    def _content(self, text: str) -> list[pb.Piece]:
        if self._trims:
            text = text.lstrip(_LINE_BREAKS)
        if not text:
            return []
        self._trims = False
        stripped = text.rstrip(_LINE_BREAKS)
        certain, self._breaks = self._breaks + stripped, text[len(stripped) :]
        if not stripped:
            self._breaks, certain = certain + text, ""
        return [pb.Piece(text=certain)] if certain else []

    async def _called(self, segment: Segment) -> list[pb.Piece]:
        pieces: list[pb.Piece] = []
        self._has_reasoning, self._waiting = False, ""
        if self._call is None:
            self._call = _CallText(CallStream(self._tools) if self._in_parts else None)
        call = self._call
        call.parts.append(segment.text)
        call.is_whole = segment.is_whole
        if call.stream is not None:
            had_begun = call.stream.has_begun
            if arguments := call.stream.feed(segment.text, segment.scans):
                self._breaks, self._trims = "", True
                pieces.append(_part(arguments, name="" if had_begun else call.stream.name))
        if segment.ends:
            pieces += await self._call_end(ended=True)
        return pieces

    async def _call_end(self, *, ended: bool) -> list[pb.Piece]:
        """The pieces at the end of a call. A call that the model has not `ended` may parse and
        still be incomplete: it is content, or stays open if its beginning was sent."""
        assert self._call is not None
        call, self._call = self._call, None
        text = "".join(call.parts)
        calls: Sequence[Call] | None = None
        if ended and self._parse is not None:
            calls = await self._parse(text)
        if call.stream is not None and call.stream.has_begun:
            rest = call.stream.finish(calls, is_whole=ended and call.is_whole)
            pieces = [_part(rest.arguments, ends=True, is_cut=rest.is_cut)]
            return [*pieces, *self._content(rest.text), *map(_whole, rest.calls)]
        if calls is None:
            self._trims = False
            return self._content(text)
        self._breaks, self._trims = "", True
        return [*map(_whole, calls)]


class _CallText:
    """A section of calls that has not ended: its text, and the stream of its parts."""

    def __init__(self, stream: CallStream | None) -> None:
        self.stream = stream
        self.parts: list[str] = []
        self.is_whole = False


def _part(arguments: str, *, name: str = "", ends: bool = False, is_cut: bool = False) -> pb.Piece:
    return pb.Piece(call_part=pb.CallPart(name=name, arguments=arguments, ends=ends, is_cut=is_cut))


def _whole(call: Call) -> pb.Piece:
    return pb.Piece(call=pb.ToolCall(name=call.name, arguments=call.arguments))
