"""The process that renders chat templates and tokenises prompts for a runner.

Templates and tokenizers are the checkpoint's programs and run on a client's text: either may need
unlimited time or memory. Started as `python -P -m exo_node.shard.text.helper`. Packets arrive on
stdin and leave on stdout. The process ends when stdin closes, and when a request exceeds its
limits.
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
import time
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn

from ...placement.errors import PROMPT, ExoNodeError, InvalidRequest
from .bare_packages import bare_package, bare_transformers
from .messages import chat_from_json
from .orphans import continue_when_orphaned

if TYPE_CHECKING:
    from .codec import TextCodec

_Work = Literal["encode", "encode_text", "encode_infill", "decode", "calls", "grammar", "image"]
Kind = _Work | Literal["open", "table", "images", "done", "fault"]
"""Kinds of requests and of answers (`done`, `fault`). `table` builds the table of the vocabulary
that grammars need, `images` imports what reads image files."""

HEAD = struct.Struct(">II")
"""Bytes of a packet's JSON and of its data, which follow."""

_STATM = Path("/proc/self/statm")


class Packet(NamedTuple):
    """A request or its answer; `fields` are JSON values."""

    kind: Kind
    fields: Mapping[str, Any]
    data: bytes = b""

    def pack(self) -> bytes:
        """The packet's bytes, HEAD included."""
        text = json.dumps([self.kind, self.fields]).encode()
        return HEAD.pack(len(text), len(self.data)) + text + self.data


def main() -> NoReturn:
    """Entry point of the child process."""
    continue_when_orphaned()
    logging.disable()  # a library's warning may quote a prompt
    gc.disable()  # during imports, whose objects all stay
    bare_package("mlx_lm")
    bare_transformers()
    from .codec import TextCodec

    gc.freeze()
    gc.enable()

    packets: queue.SimpleQueue[Packet] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(sys.stdin.buffer, packets), daemon=True).start()
    _send(Packet("done", {}).pack())
    folder = Path(os.fsdecode(packets.get().data))
    try:
        codec = TextCodec.load(folder)
    except ExoNodeError as fault:
        _send(_refusal(fault).pack())
        os._exit(1)
    _silence_stderr()
    _send(Packet("done", {"longest_token": codec.longest_token}).pack())
    while True:
        request = packets.get()
        _limit_time(request.fields["cpu_s"])
        _limit_memory(request.fields["memory_bytes"])
        _send(_answer(codec, request))


def _answer(codec: "TextCodec", request: Packet) -> bytes:
    try:
        return _result(codec, request).pack()
    except ExoNodeError as fault:
        refusal = fault
    except MemoryError:
        refusal = over_memory()
    # The edge of this process. The kind only: a message may quote the prompt.
    except Exception as fault:
        message = f"the model's tokenizer or chat template failed ({type(fault).__name__})"
        refusal = InvalidRequest(message, param=PROMPT)
    return _refusal(refusal).pack()


def _result(codec: "TextCodec", request: Packet) -> Packet:
    fields, data = request.fields, request.data
    match request.kind:
        case "encode":
            from .template import options_of  # imports jinja2, as the codec does

            chat, notes = chat_from_json(data.decode()), list[str]()
            options = options_of(chat.options)
            ids = codec.encode_chat(chat.messages, fields["limit"], chat.tools, options, notes)
            return _ids(ids, notes)
        case "encode_text":
            return _ids(codec.encode_text(*json.loads(data)))
        case "encode_infill":
            return _ids(codec.encode_infill(*json.loads(data)))
        case "decode":
            text = codec.decode(array("I", data).tolist())
            return Packet("done", {}, text.encode(errors="replace"))
        case "calls":
            text, tools = json.loads(data)
            calls = codec.calls(text, tools)
            return Packet("done", {"calls": calls and [[c.name, c.arguments] for c in calls]})
        case "grammar":
            from .grammars.grammars import GrammarSpec

            codec.grammars.check(GrammarSpec(*fields["spec"]))
        case "image":
            from .pictures import header_of

            began_s = time.process_time()
            image = codec.pictures.prepare(data)
            used = {"cpu_s": time.process_time() - began_s}
            return Packet("done", header_of(image) | used, image.pixels)
        case "table":
            codec.grammars.build_table()
        case "images":
            _ = codec.pictures
        case "open" | "done" | "fault":
            raise AssertionError(request.kind)
    return Packet("done", {})


def _ids(ids: Sequence[int], notes: Sequence[str] = ()) -> Packet:
    return Packet("done", {"notes": notes}, array("I", ids).tobytes())


def _refusal(fault: ExoNodeError) -> Packet:
    text = fault.message.encode(errors="replace").decode()
    return Packet("fault", {"code": fault.code, "message": text, "param": fault.param})


def over_memory() -> ExoNodeError:
    return InvalidRequest(
        "the model's chat template and tokenizer need more memory for this prompt than a "
        "request may have; shorten it, or correct the template",
        param=PROMPT,
    )


def _read(source: IO[bytes], packets: "queue.SimpleQueue[Packet]") -> None:
    """Reads packets on its own thread, so that a looping template does not outlive the runner."""
    while len(head := source.read(HEAD.size)) == HEAD.size:
        text_bytes, data_bytes = HEAD.unpack(head)
        text, data = source.read(text_bytes), source.read(data_bytes)
        if len(data) < data_bytes:
            break
        kind, fields = json.loads(text)
        packets.put(Packet(kind, fields, data))
    os._exit(0)


def _send(packet: bytes) -> None:
    _ = sys.stdout.buffer.write(packet)
    sys.stdout.buffer.flush()


def _silence_stderr() -> None:
    """Discards stderr from here on: prompts come next, and a crash may quote one."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    _ = os.dup2(nowhere, sys.stderr.fileno())
    os.close(nowhere)


def _limit_memory(more: int) -> None:
    """Makes allocations beyond `more` bytes fail, or none if it is 0. Only Linux counts them."""
    if _STATM.exists():
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        data = int(_STATM.read_text().split()[5]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_DATA, (data + more if more else hard, hard))


def _limit_time(more_s: int) -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = int(used.ru_utime + used.ru_stime) + 1 + more_s
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    if hard == resource.RLIM_INFINITY or seconds <= hard:
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, hard))


if __name__ == "__main__":
    main()
