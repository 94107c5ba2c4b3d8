"""Encodes messages and checks grammars in helper processes with limits on time and memory."""

import asyncio
import json
import logging
from array import array
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from weakref import WeakValueDictionary

from ...placement.errors import PROMPT, InvalidRequest, LoadFailed
from .grammars.grammars import GrammarSpec
from .helper import Kind, Packet
from .helper_process import (
    HelperLimits,
    HelperLost,
    HelperProcess,
    again_if_lost,
    blamed_on_prompt,
    start_helper,
)
from .image_rows import PreparedImage
from .messages import check_length, too_long
from .pictures import image_of
from .tools.tool_calls import Call


class HelperQueue:
    """A helper process and its replacements, for one request at a time."""

    def __init__(self, folder: "asyncio.Future[Path]", limits: HelperLimits) -> None:
        self._folder = folder
        self._limits = limits
        self._turn = asyncio.Lock()
        self._starting: asyncio.Task[HelperProcess] | None = None
        self._runs: set[asyncio.Task[Packet]] = set()

    def start(self) -> "asyncio.Task[HelperProcess]":
        if self._starting is None or _has_ended(self._starting):
            self._starting = asyncio.create_task(start_helper(self._folder, self._limits))
            self._starting.add_done_callback(_retrieve_exception)
        return self._starting

    @property
    def pid(self) -> int:
        """The process's id; 0 while none has opened the tokenizer."""
        starting = self._starting
        if starting is None or not starting.done() or _has_ended(starting):
            return 0
        return starting.result().process.pid

    async def longest_token(self) -> int:
        return (await asyncio.shield(self.start())).longest_token

    async def ask(self, kind: Kind, data: bytes = b"", **fields: Any) -> Packet:
        """The helper's answer. Raises its errors, InvalidRequest for a limit, and LoadFailed.

        Cancelling it soon ends the work.
        """
        disconnected = asyncio.Event()
        run = asyncio.create_task(self._in_turn(Packet(kind, fields, data), disconnected))
        self._runs.add(run)
        run.add_done_callback(self._discard)
        try:
            return await asyncio.shield(run)
        finally:
            disconnected.set()

    def _discard(self, run: "asyncio.Task[Packet]") -> None:
        self._runs.discard(run)
        _retrieve_exception(run)

    async def _in_turn(self, request: Packet, disconnected: asyncio.Event) -> Packet:
        async with self._turn:
            try:
                return await again_if_lost(lambda: self._ask_once(request, disconnected))
            except HelperLost as fault:
                if fault.crashed:
                    raise blamed_on_prompt(fault.ending) from fault
                raise LoadFailed(
                    f"the tokenizer's process {fault.ending}, and so did the one before it; "
                    "try again"
                ) from fault

    async def _ask_once(self, request: Packet, disconnected: asyncio.Event) -> Packet:
        if disconnected.is_set():
            raise asyncio.CancelledError
        helper = await asyncio.shield(self.start())
        try:
            return await helper.ask(request, disconnected)
        finally:
            if helper.has_ended:
                _ = self.start()

    async def close(self) -> None:
        for run in self._runs:
            _ = run.cancel()
        if self._starting is None:
            return
        if not self._starting.done():
            # It ends with its pipes; asyncio may wait for a process that it only just started.
            _ = self._starting.cancel()
            _ = await asyncio.wait([self._starting], timeout=1.0)
        if self._starting.done() and not _has_ended(self._starting):
            await self._starting.result().end()


def _has_ended(starting: "asyncio.Task[HelperProcess]") -> bool:
    if not starting.done():
        return False
    failed = starting.cancelled() or starting.exception() is not None
    return failed or starting.result().has_ended


def _retrieve_exception(task: "asyncio.Task[Any]") -> None:
    """Marks the task's exception as seen: its awaiters get it, and asyncio need not warn."""
    if not task.cancelled():
        _ = task.exception()


log = logging.getLogger(__name__)

LONG_BYTES: Final = 128 << 10
"""Larger requests have a helper of their own, so that they delay only each other."""
USUAL_BYTES: Final = 16
"""Bytes of text of a token that few texts exceed on average."""


class PromptEncoder:
    """Encodes chats. A request that exceeds a limit is refused, and its helper is replaced.

    `start` spawns the first helper and returns at once; `open` gives it the checkpoint once that is
    validated. The first long request or grammar starts a second helper, the first image a third.
    """

    def __init__(self, limits: HelperLimits | None = None) -> None:
        self._limits = limits or HelperLimits()
        self._longest_token = 0
        self._folder: asyncio.Future[Path] = asyncio.get_running_loop().create_future()
        self._short = HelperQueue(self._folder, self._limits)
        self._long = HelperQueue(self._folder, self._limits)
        self._pictures = HelperQueue(self._folder, self._limits)
        self._image_turns = WeakValueDictionary[bytes, asyncio.Lock]()
        """A client has one image in the queue: others wait for one of its images at most."""

    def start(self) -> None:
        self._short.start()

    def open(self, folder: Path) -> None:
        self._folder.set_result(folder)

    @property
    def pids(self) -> list[int]:
        """Process ids of the running helpers."""
        return [pid for helper in self._helpers if (pid := helper.pid)]

    @property
    def _helpers(self) -> tuple[HelperQueue, ...]:
        return self._short, self._long, self._pictures

    async def encode(
        self, messages: str, context_length: int, notes: list[str] | None = None
    ) -> list[int]:
        """Ids of a chat; `messages` is the JSON of `messages.chat_json`.

        Cancelling it soon ends the work. Appends to `notes` each option that the template does not
        support. Raises ContextLengthExceeded for text that cannot fit the context with any tokens,
        and InvalidRequest if the template, the tokenizer or a limit refuses it.
        """
        limit = await self._limit(context_length)
        await asyncio.to_thread(check_length, messages, limit, self._longest_token)
        answer = await self._ask("encode", messages, limit=limit)
        if notes is not None:
            notes += answer.fields["notes"]
        return array("I", answer.data).tolist()

    async def encode_text(self, text: str, context_length: int) -> list[int]:
        """Ids of a whole prompt, without a template; otherwise like `encode`."""
        return await self._within("encode_text", context_length, text)

    async def encode_infill(self, prefix: str, suffix: str, context_length: int) -> list[int]:
        """Ids of a prompt whose answer fills the gap between two texts; otherwise like
        `encode_text`. Raises UnsupportedParameter if the tokenizer has no tokens for it."""
        return await self._within("encode_infill", context_length, prefix, suffix)

    async def _within(self, kind: Kind, context_length: int, *texts: str) -> list[int]:
        """Ids of texts, unless they are too long for any tokens. Raises ContextLengthExceeded."""
        limit = await self._limit(context_length)
        if (size := len("".join(texts).encode(errors="replace"))) > limit:
            raise too_long(size, limit, self._longest_token)
        answer = await self._ask(kind, json.dumps(texts, ensure_ascii=False))
        return array("I", answer.data).tolist()

    async def encode_beginning(self, text: str, tokens: int) -> tuple[list[int], bool]:
        """Ids of a whole prompt, or of as much of its beginning as gives more than `tokens`, and
        whether that is the whole.

        Where a tokenizer drops characters (spaces, for BERT) a beginning may give fewer.
        """
        raw, longest = text.encode(errors="replace"), await self._limit(1)
        for bytes_a_token in (min(USUAL_BYTES, longest), longest):
            beginning = raw[: tokens * bytes_a_token]
            ids = await self.encode_text(beginning.decode(errors="ignore"), tokens)
            if len(ids) > tokens or len(beginning) == len(raw):
                break
        return ids, len(beginning) == len(raw)

    async def decode(self, ids: Sequence[int]) -> str:
        """The text of these ids. Raises InvalidRequest."""
        return (await self._short.ask("decode", array("I", ids).tobytes())).data.decode()

    async def images(
        self, files: Iterable[tuple[bytes, str]], client: bytes = b""
    ) -> AsyncGenerator[PreparedImage]:
        """Image files of one request as the model's tower takes them, each when it is drawn.

        `files`: their bytes, and their fields in the request, for errors. Raises InvalidRequest
        naming the field.
        """
        left_s = self._limits.images_cpu_s
        for data, field in files:
            if left_s <= 0:
                raise InvalidRequest(
                    f"the images before this one took {self._limits.images_cpu_s:g} s to decode, "
                    "as much as those of a request may; leave images out, or scale them down",
                    param=field,
                )
            async with self._image_turns.setdefault(client, asyncio.Lock()):
                image = await self._image(data, field)
            left_s -= image.fields["cpu_s"]
            yield image_of(image.fields, image.data)

    async def _image(self, data: bytes, field: str) -> Packet:
        try:
            return await self._pictures.ask("image", data)
        except InvalidRequest as fault:
            why = fault.message
            if fault.param is not None:  # a limit, which blames the prompt
                why = "the image takes more time or memory to decode than one may; scale it down"
            raise InvalidRequest(why, param=field) from fault

    async def calls(self, text: str, tools: Sequence[Mapping[str, Any]]) -> list[Call] | None:
        """The tool calls in a text; None if it contains none, or a limit ended the search."""
        request = json.dumps([text, list(tools)])
        try:
            answer = await self._ask("calls", request)
        except InvalidRequest as fault:
            log.warning("what looked like a call of a tool is passed on as text: %s", fault.code)
            return None
        calls: list[list[str]] | None = answer.fields["calls"]
        return None if calls is None else [Call(*call) for call in calls]

    async def check(self, spec: GrammarSpec) -> None:
        """Compiles a grammar within the limits. Raises InvalidRequest if that fails.

        Uses the helper for long requests: if a grammar ends it, its replacement takes seconds, for
        which short prompts must not wait.
        """
        try:
            _ = await self._long.ask("grammar", spec=[spec.kind, spec.text, spec.field])
        except InvalidRequest as fault:
            if fault.param != PROMPT:  # that is of the helper's own limits
                raise
            raise InvalidRequest(
                f"'{spec.field}' takes more time or memory to compile than a request may have; "
                "make it smaller",
                param=spec.field,
            ) from fault

    async def _limit(self, context_length: int) -> int:
        if not self._longest_token:
            self._longest_token = await self._short.longest_token()
        return context_length * self._longest_token

    async def _ask(self, kind: Kind, text: str, **fields: Any) -> Packet:
        helper = self._long if len(text) > LONG_BYTES else self._short
        return await helper.ask(kind, text.encode(), **fields)

    async def close(self) -> None:
        _ = self._folder.cancel()
        _ = await asyncio.gather(*(each.close() for each in self._helpers))
