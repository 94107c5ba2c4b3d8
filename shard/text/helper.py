"""The process that renders chat templates and tokenises prompts for a runner.

Both are a checkpoint's own programs run on a client's own text: either may take for ever, or all
memory. Started as `python -P -m exo_node.shard.text.helper BYTES`; frames come in on stdin and go
out on stdout, each a kind and a length before its body. It ends with its stdin, and with the
request that takes more than its limits.
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
from pathlib import Path
from typing import IO, TYPE_CHECKING, NoReturn

from ...placement.errors import ExoNodeError, InvalidRequest
from .bare_mlx_lm import bare_mlx_lm
from .bare_transformers import bare_transformers
from .messages import chat_from_json

if TYPE_CHECKING:
    from .codec import TextCodec

HEAD = struct.Struct(">cI")
OPEN, ENCODE, ENCODE_TEXT, DECODE, CALLS, GRAMMAR = b"o", b"e", b"t", b"d", b"c", b"g"
"""To the helper: the checkpoint's folder; a limit of bytes (8 bytes, big-endian) and a chat, or a
text; 32-bit ids; JSON of a text that may hold calls and of the tools that they may call; JSON of a
grammar's kind, text and field."""
STARTED, OPENED, IDS, TEXT, FAULT = b"s", b"r", b"i", b"x", b"f"
"""From it: imports are done; bytes of the longest token; 32-bit ids; text or JSON; an error."""
CPU_BACKSTOP_S = 5
"""Of one request. The runner ends this process earlier, unless it hangs itself."""

Frame = tuple[bytes, bytes]


def frame(kind: bytes, body: bytes = b"") -> bytes:
    return HEAD.pack(kind, len(body)) + body


def fault_body(fault: ExoNodeError) -> bytes:
    return "\0".join((fault.code, fault.param or "", fault.message)).encode(errors="replace")


def main() -> NoReturn:
    """Entry point of the child process; argument 1 is what one request may add to its memory."""
    logging.disable()  # a library's warning may quote a prompt
    gc.disable()  # while it imports: what is made by then stays
    bare_mlx_lm()
    bare_transformers()
    from .codec import TextCodec

    gc.freeze()
    gc.enable()

    frames: queue.SimpleQueue[Frame] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(sys.stdin.buffer, frames), daemon=True).start()
    _say(frame(STARTED))
    kind, folder = frames.get()
    assert kind == OPEN
    try:
        codec = TextCodec.load(Path(os.fsdecode(folder)))
    except ExoNodeError as fault:
        _say(frame(FAULT, fault_body(fault)))
        os._exit(1)
    _limit_memory(int(sys.argv[1]))
    _hush()
    _say(frame(OPENED, struct.pack(">Q", codec.longest_token)))
    while True:
        kind, body = frames.get()
        _limit_time()
        _say(_answer(codec, kind, body))


def _answer(codec: "TextCodec", kind: bytes, body: bytes) -> bytes:
    try:
        return _done(codec, kind, body)
    except ExoNodeError as fault:
        return frame(FAULT, fault_body(fault))
    except MemoryError:
        return frame(FAULT, fault_body(over_memory()))
    # The edge of this process. The kind only: a message may quote the prompt.
    except Exception as fault:
        told = f"the model's tokenizer or chat template failed ({type(fault).__name__})"
        return frame(FAULT, fault_body(InvalidRequest(told, param="messages")))


def _done(codec: "TextCodec", kind: bytes, body: bytes) -> bytes:
    if kind == CALLS:
        asked = json.loads(body)
        calls = codec.calls(asked["text"], asked["tools"])
        told = None if calls is None else [[call.name, call.arguments] for call in calls]
        return frame(TEXT, json.dumps(told).encode())
    if kind == GRAMMAR:
        from .grammars import check, spec_of

        check(spec_of(*json.loads(body)))
        return frame(TEXT)
    if kind == DECODE:
        return frame(TEXT, codec.decode(array("I", body).tolist()).encode(errors="replace"))
    limit, text = int.from_bytes(body[:8], "big"), body[8:].decode()
    if kind == ENCODE_TEXT:
        return frame(IDS, array("I", codec.encode_text(text, limit)).tobytes())
    from .template import options_of  # imports jinja2, as the codec does

    chat = chat_from_json(text)
    ids = codec.encode_chat(chat.messages, limit, chat.tools, options_of(chat.options))
    return frame(IDS, array("I", ids).tobytes())


def over_memory() -> ExoNodeError:
    return InvalidRequest(
        "the model's chat template and tokenizer need more memory for these messages than a "
        "request may have; shorten the messages, or correct the template",
        param="messages",
    )


def _read(source: IO[bytes], frames: "queue.SimpleQueue[Frame]") -> None:
    """A thread of its own: a template that loops must not outlive the runner."""
    while len(head := source.read(HEAD.size)) == HEAD.size:
        kind, size = HEAD.unpack(head)
        body = source.read(size)
        if len(body) < size:
            break
        frames.put((kind, body))
    os._exit(0)


def _say(data: bytes) -> None:
    _ = sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def _hush() -> None:
    """No word more on stderr: prompts come from here on, and a crash may quote one."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    _ = os.dup2(nowhere, sys.stderr.fileno())
    os.close(nowhere)


def _limit_memory(more: int) -> None:
    """Allocations fail beyond what is held now and `more`; only Linux counts them (RLIMIT_DATA)."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return
    held = int(statm.read_text().split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (held + more, held + more))


def _limit_time() -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = int(used.ru_utime + used.ru_stime) + 1 + CPU_BACKSTOP_S
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    if hard == resource.RLIM_INFINITY or seconds <= hard:
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, hard))


if __name__ == "__main__":
    main()
