"""The process that renders chat templates and tokenises prompts for a runner.

Templates and tokenizers are the checkpoint's programs and run on a client's text: either may need
unlimited time or memory. Started as `python -P -m exo_node.shard.text.helper BYTES`. Frames arrive
on stdin and leave on stdout; each has a kind, a length and a body. The process ends when stdin
closes, and when a request exceeds its limits.
"""

import gc
import json
import logging
import os
import queue
import resource
import struct
import sys
import threading
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, NoReturn

from ...placement.errors import ExoNodeError, InvalidRequest
from .bare_packages import bare_mlx_lm, bare_transformers
from .grammar import GRAMMAR_BYTES
from .messages import chat_from_json

if TYPE_CHECKING:
    from .codec import TextCodec

HEAD = struct.Struct(">cI")
_LENGTH = struct.Struct(">I")
OPEN, ENCODE, ENCODE_TEXT, ENCODE_INFILL, DECODE = b"o", b"e", b"t", b"u", b"d"
CALLS, TABLE, GRAMMAR, IMAGES, IMAGE = b"c", b"v", b"g", b"P", b"p"
"""Kinds of frames to the helper, with their bodies. OPEN: the checkpoint's folder. ENCODE,
ENCODE_TEXT, ENCODE_INFILL: a limit of bytes (8 bytes, big-endian), then a chat, a text, or JSON
with the texts around a gap. DECODE: 32-bit ids.
CALLS: JSON with a text that may contain calls, the tools, and whether arguments may be missing.
TABLE: empty; builds the table of the vocabulary that grammars need. GRAMMAR: JSON with a grammar's
kind, text and field. IMAGES: empty; imports what reads image files. IMAGE: such a file.
"""
STARTED, OPENED, IDS, TEXT, FAULT, PIXELS = b"s", b"r", b"i", b"x", b"f", b"m"
"""Kinds of frames from the helper. STARTED: its imports are complete. OPENED: bytes of the longest
token. IDS: see `ids_frame`. TEXT: text or JSON. FAULT: an error. PIXELS: JSON with its length in
front, and the pixels of an image."""
CPU_BACKSTOP_S = 5
"""CPU seconds of one request. The runner ends this process earlier, unless it hangs itself."""
TABLE_CPU_S = 60
"""CPU seconds to build the table. The vocabulary's size is limited when it is loaded."""
IMAGE_BYTES = 1 << 30
"""Bytes of memory that one image may take."""

_STATM = Path("/proc/self/statm")

Frame = tuple[bytes, bytes]


def frame(kind: bytes, body: bytes = b"") -> bytes:
    return HEAD.pack(kind, len(body)) + body


def ids_frame(ids: Sequence[int], notes: Sequence[str] = ()) -> bytes:
    """A frame of `notes` (JSON with its length in front) and 32-bit ids."""
    header = json.dumps(notes).encode()
    return frame(IDS, _LENGTH.pack(len(header)) + header + array("I", ids).tobytes())


def ids_and_notes(body: bytes) -> tuple[list[str], list[int]]:
    """The notes and the ids of a frame that `ids_frame` made."""
    start = _LENGTH.size + _LENGTH.unpack_from(body)[0]
    return json.loads(body[_LENGTH.size : start]), array("I", body[start:]).tolist()


def fault_body(fault: ExoNodeError) -> bytes:
    return "\0".join((fault.code, fault.param or "", fault.message)).encode(errors="replace")


def main() -> NoReturn:
    """Entry point of the child process; argument 1: bytes of memory that one request may add."""
    logging.disable()  # a library's warning may quote a prompt
    gc.disable()  # during imports, whose objects all stay
    bare_mlx_lm()
    bare_transformers()
    from .codec import TextCodec

    gc.freeze()
    gc.enable()

    frames: queue.SimpleQueue[Frame] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(sys.stdin.buffer, frames), daemon=True).start()
    _send(frame(STARTED))
    kind, folder = frames.get()
    assert kind == OPEN
    try:
        codec = TextCodec.load(Path(os.fsdecode(folder)))
    except ExoNodeError as fault:
        _send(frame(FAULT, fault_body(fault)))
        os._exit(1)
    memory = _MemoryLimit(int(sys.argv[1]))
    _silence_stderr()
    _send(frame(OPENED, struct.pack(">Q", codec.longest_token)))
    while True:
        kind, body = frames.get()
        _limit_time(TABLE_CPU_S if kind in (TABLE, IMAGES, IMAGE) else CPU_BACKSTOP_S)
        memory.apply(kind)
        _send(_answer(codec, kind, body))
        if kind in (TABLE, IMAGES):
            memory = _MemoryLimit(int(sys.argv[1]))


def _answer(codec: "TextCodec", kind: bytes, body: bytes) -> bytes:
    try:
        return _result(codec, kind, body)
    except ExoNodeError as fault:
        return frame(FAULT, fault_body(fault))
    except MemoryError:
        return frame(FAULT, fault_body(over_memory()))
    # The edge of this process. The kind only: a message may quote the prompt.
    except Exception as fault:
        message = f"the model's tokenizer or chat template failed ({type(fault).__name__})"
        return frame(FAULT, fault_body(InvalidRequest(message, param="messages")))


def _result(codec: "TextCodec", kind: bytes, body: bytes) -> bytes:
    if kind == CALLS:
        fields = json.loads(body)
        calls = codec.calls(fields["text"], fields["tools"], is_beginning=fields["is_beginning"])
        result = None if calls is None else [[call.name, call.arguments] for call in calls]
        return frame(TEXT, json.dumps(result).encode())
    if kind == TABLE:
        codec.grammars.build_table()
        return frame(TEXT)
    if kind == GRAMMAR:
        from .grammars import GrammarSpec

        codec.grammars.check(GrammarSpec(*json.loads(body)))
        return frame(TEXT)
    if kind == IMAGES:
        codec.begin_images()
        return frame(TEXT)
    if kind == IMAGE:
        return _image_frame(codec, body)
    if kind == DECODE:
        return frame(TEXT, codec.decode(array("I", body).tolist()).encode(errors="replace"))
    limit, text = int.from_bytes(body[:8], "big"), body[8:].decode()
    if kind == ENCODE_TEXT:
        return ids_frame(codec.encode_text(text, limit))
    if kind == ENCODE_INFILL:
        prefix, suffix = json.loads(text)
        return ids_frame(codec.encode_infill(prefix, suffix, limit))
    from .template import options_of  # imports jinja2, as the codec does

    chat = chat_from_json(text)
    notes: list[str] = []
    ids = codec.encode_chat(chat.messages, limit, chat.tools, options_of(chat.options), notes)
    return ids_frame(ids, notes)


def _image_frame(codec: "TextCodec", data: bytes) -> bytes:
    from .pictures import header_of

    image = codec.prepare_image(data)
    header = header_of(image)
    return frame(PIXELS, _LENGTH.pack(len(header)) + header + image.pixels)


def image_parts(body: bytes) -> tuple[bytes, bytes]:
    """The header and the pixels in a frame of kind PIXELS."""
    begin = _LENGTH.size + _LENGTH.unpack_from(body)[0]
    return body[_LENGTH.size : begin], body[begin:]


def over_memory() -> ExoNodeError:
    return InvalidRequest(
        "the model's chat template and tokenizer need more memory for these messages than a "
        "request may have; shorten the messages, or correct the template",
        param="messages",
    )


def _read(source: IO[bytes], frames: "queue.SimpleQueue[Frame]") -> None:
    """Reads frames on its own thread, so that a looping template does not outlive the runner."""
    while len(head := source.read(HEAD.size)) == HEAD.size:
        kind, size = HEAD.unpack(head)
        body = source.read(size)
        if len(body) < size:
            break
        frames.put((kind, body))
    os._exit(0)


def _send(data: bytes) -> None:
    _ = sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def _silence_stderr() -> None:
    """Discards stderr from here on: prompts come next, and a crash may quote one."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    _ = os.dup2(nowhere, sys.stderr.fileno())
    os.close(nowhere)


class _MemoryLimit:
    """Makes allocations beyond a limit fail. Only Linux counts them (RLIMIT_DATA)."""

    def __init__(self, more: int) -> None:
        """`more`: bytes that one request may add to the current memory."""
        self._most = _data_bytes() + more

    def apply(self, kind: bytes) -> None:
        most, hard = self._most, resource.getrlimit(resource.RLIMIT_DATA)[1]
        if kind == GRAMMAR:
            most = min(most, _data_bytes() + GRAMMAR_BYTES)
        elif kind == IMAGE:
            most = _data_bytes() + IMAGE_BYTES
        elif kind in (TABLE, IMAGES):
            most = hard
        if _STATM.exists():
            resource.setrlimit(resource.RLIMIT_DATA, (most, hard))


def _data_bytes() -> int:
    """Bytes of data and stack of this process; 0 if the system does not report them."""
    if not _STATM.exists():
        return 0
    return int(_STATM.read_text().split()[5]) * resource.getpagesize()


def _limit_time(more_s: int) -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = int(used.ru_utime + used.ru_stime) + 1 + more_s
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    if hard == resource.RLIM_INFINITY or seconds <= hard:
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, hard))


if __name__ == "__main__":
    main()
