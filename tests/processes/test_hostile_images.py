"""A real node answers about images what transformers does; it reads or refuses any image file, in
bounded memory, and other answers go on."""

import base64
import http.client
import json
import re
import shutil
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import psutil
import pytest
from image_files import READ, REFUSED, noted, saved
from nodes import CALL_S, Node, Reply, node
from pictures import DENSE, conversations

from exo_node.shard.text.pictures import PictureProcessor

AT = "messages[0].content[1].image_url.url"
PHOTO = 8064, 6048
"""A telephone's 48 million pixels."""
MOST_BYTES = {"node": 200 << 20, "runner": 200 << 20, "helper": 650 << 20}
"""What all images together may add. A body has 33 MB at most, and is there as text and as bytes; a
photo takes ten bytes a pixel, beside what decoding imports."""
LONG: dict[str, tuple[int, int, str, str]] = {
    "21 MB": (28_000_000, 400, AT, "longer than 20 MB; send a smaller image"),
    "100 MB": (133_000_000, 413, "body", "send less at once"),
}
"""Letters of base64, and how they are refused. Other data URLs: `tests/node/api/test_images.py`."""


@dataclass
class Seen:
    """What happened while all files were sent."""

    replies: dict[str, Reply] = field(default_factory=dict[str, Reply])
    expected: dict[str, Reply] = field(default_factory=dict[str, Reply])
    """Replies to the same pixels as PNG."""
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    bytes: dict[str, int] = field(default_factory=dict[str, int])
    """By kind of process, the most that it had more than before."""
    gaps: list[float] = field(default_factory=list[float])
    """Between the events of other answers."""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp("images")
    _ = shutil.copytree(DENSE, folder / "models" / "pictures")
    flags = ("--no-mdns", "--dtype", "float32", "--models-dir", str(folder / "models"))
    with node(folder / "data", *flags, sound=True) as started:
        yield started


def part_of(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def url_of(file: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(file).decode()}"


def body_of(url: str) -> bytes:
    message = {"role": "user", "content": [{"type": "text", "text": "What is this?"}, part_of(url)]}
    fields = {"temperature": 0, "max_tokens": 4, "return_token_ids": True}
    return json.dumps({"model": "pictures", "messages": [message], **fields}).encode()


def body_of_file(file: bytes, media_type: str = "image/png") -> bytes:
    return body_of(url_of(file, media_type))


def show(running: Node, body: bytes) -> Reply:
    try:
        return running.call("POST", "/v1/chat/completions", body)
    except (BrokenPipeError, ConnectionResetError):  # refused by its length, while it is sent
        return _refused_early(running, len(body))


def _refused_early(running: Node, length: int) -> Reply:
    connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=CALL_S)
    connection.putrequest("POST", "/v1/chat/completions")
    connection.putheader("Content-Type", "application/json")
    connection.putheader("Content-Length", str(length))
    connection.endheaders()
    response = connection.getresponse()
    reply = Reply(response.status, json.loads(response.read()))
    connection.close()
    return reply


@pytest.fixture(scope="module")
def report(running: Node) -> Seen:
    it = Seen()
    # What is made before holds up no thread of this process that reads other answers.
    bodies = {name: body_of_file(file()) for name, (file, _) in (READ | REFUSED).items()}
    bodies["a photo"] = body_of_file(noted("JPEG", 6, PHOTO, quality=90))
    for name, (letters, *_) in LONG.items():
        bodies[name] = body_of("data:image/png;base64," + "A" * letters)
    bodies |= {f"{name} again": bodies[name] for name in ("PNG", "a photo")}
    assert show(running, bodies["PNG"]).status == 200  # what it imports is no image's
    with _memory(running, it.bytes), _answering(running, it.gaps):
        for name, body in bodies.items():
            began = time.monotonic()
            it.replies[name] = show(running, body)
            it.seconds[name] = time.monotonic() - began
    for name, (_, pixels) in READ.items():
        it.expected[name] = show(running, body_of_file(saved(pixels()), "image/jpeg"))
    return it


@contextmanager
def _memory(running: Node, most: dict[str, int]) -> Generator[None]:
    ended, before = threading.Event(), dict[int, int]()

    def look() -> None:
        root = psutil.Process(running.process.pid)
        for process in (root, *root.children(recursive=True)):
            try:
                size, line = process.memory_info().rss, " ".join(process.cmdline())
            except psutil.Error:  # it has ended since
                continue
            kind = "helper" if "text.helper" in line else "runner"
            kind = "node" if process == root else kind
            # A helper that took the place of another has imported what that one had.
            base = before.setdefault(process.pid, size if kind != "helper" else 0)
            most[kind] = max(most.get(kind, 0), size - base)

    def watch() -> None:
        while not ended.wait(0.02):
            look()

    look()
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


@contextmanager
def _answering(running: Node, gaps: list[float]) -> Generator[None]:
    """Answers in text, one after the other."""
    ended = threading.Event()

    def ask() -> None:
        while not ended.is_set():
            with running.stream("Go on.", model="pictures", max_tokens=3000) as events:
                times = [time.monotonic() for event in events if _is_text(event)]
            gaps.extend(b - a for a, b in pairwise(times))

    asker = threading.Thread(target=ask)
    asker.start()
    try:
        yield
    finally:
        ended.set()
        asker.join()


def _is_text(event: Any) -> bool:
    return event != "[DONE]" and bool(event["choices"][0]["delta"].get("content"))


def ids_of(reply: Reply) -> tuple[list[int], list[int]]:
    assert reply.status == 200, reply.body
    (choice,) = reply.body["choices"]
    prompt: list[int] = reply.body.get("prompt_token_ids") or choice["prompt_token_ids"]
    return prompt, choice["token_ids"]


def answered(running: Node, number: int, files: Sequence[bytes]) -> list[tuple[int, float]]:
    """The tokens of the answer to a conversation of the oracle, with their log-probabilities."""
    rest = iter(files)
    messages = [
        message
        | {
            "content": [
                part_of(url_of(next(rest))) if part["type"] == "image" else part
                for part in message["content"]
            ]
        }
        for message in conversations()[number].messages
    ]
    tokens = len(conversations()[number].greedy_ids)
    fields = {"temperature": 0, "max_tokens": tokens, "logprobs": True, "return_token_ids": True}
    body = json.dumps({"model": "pictures", "messages": messages, **fields}).encode()
    reply = show(running, body)
    _, ids = ids_of(reply)
    entries = reply.body["choices"][0]["logprobs"]["content"]
    return [(token, entry["logprob"]) for token, entry in zip(ids, entries, strict=True)]


@pytest.mark.parametrize("number", range(len(conversations())))
def test_an_answer_is_transformers_and_another_picture_changes_it(
    running: Node, number: int
) -> None:
    """The tokens of random weights hardly depend on a picture, their log-probabilities do."""
    it = conversations()[number]
    expected = list(zip(it.greedy_ids, it.logprobs, strict=True))
    other = [saved(READ["PNG"][1]())] * len(it.files)
    right, wrong = (
        max(abs(a - b) + abs(x - y) for (x, a), (y, b) in zip(got, expected, strict=False))
        for got in (answered(running, number, files) for files in (it.files, other))
    )
    assert right < 2e-4 and wrong > 1e-3


@pytest.mark.parametrize("name", READ)
def test_a_file_is_read_as_its_pixels(report: Seen, name: str) -> None:
    prompt, answer = ids_of(report.replies[name])
    assert (prompt, answer) == ids_of(report.expected[name])
    assert min(prompt) < 0 and len(answer) == 4


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_is_refused_by_its_field(report: Seen, name: str) -> None:
    reply = report.replies[name]
    assert (reply.status, reply.body["error"]["param"]) == (400, AT), reply.body
    assert re.search(REFUSED[name][1], reply.body["error"]["message"])


@pytest.mark.parametrize("name", LONG)
def test_what_is_too_long_is_refused(report: Seen, name: str) -> None:
    _, status, param, words = LONG[name]
    reply = report.replies[name]
    error = reply.body["error"]
    assert (reply.status, error["param"]) == (status, param), error
    assert words in error["message"]


def test_a_photo_has_the_processors_rows(report: Seen) -> None:
    file = noted("JPEG", 6, PHOTO, quality=90)
    prompt, answer = ids_of(report.replies["a photo"])
    own = PictureProcessor(DENSE, lambda _: None).prepare(file)
    assert [token for token in prompt if token < 0] == own.ids
    assert own.grid[1] > own.grid[2]  # upright
    assert ids_of(report.replies["a photo again"]) == (prompt, answer)
    assert ids_of(report.replies["PNG again"]) == ids_of(report.replies["PNG"])


def test_memory_is_bounded(report: Seen) -> None:
    print({kind: f"{size >> 20} MiB" for kind, size in report.bytes.items()})
    for kind, most in MOST_BYTES.items():
        assert 0 < report.bytes[kind] < most


def test_other_answers_continue(report: Seen) -> None:
    """Another answer that waited for the slowest image would show it."""
    gaps = sorted(report.gaps)
    median, most = gaps[len(gaps) // 2], gaps[-1]
    photo, longest = report.seconds["a photo"], max(report.seconds.values())
    print(f"gaps: median {median:.4f} s, longest {most:.3f} s; images {photo:.2f}, {longest:.2f} s")
    assert len(gaps) > 100 and most < longest * 0.9
