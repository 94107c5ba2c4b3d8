"""While a real node loads its model, each official client's stream receives heartbeats."""

import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any

import psutil
import pytest
from nodes import CALL_S, Node, eventually, node
from openai import OpenAI

ASK: list[Any] = [{"role": "user", "content": "Who are you?"}]
IDLE_LIMIT_S = 8.0
"""A client's timeout without data, such as Codex's `stream_idle_timeout_ms`."""
STANDS_S = 4.0
"""Two heartbeats, so that one falls into the load of a small model on a fast machine too."""


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with node(tmp_path_factory.mktemp("demo"), "--no-mdns") as running:
        yield running


@pytest.fixture
def cold(demo: Node) -> Node:
    """The node with no model in memory."""
    reply = demo.call("POST", "/api/chat", {"model": "demo", "keep_alive": 0})
    assert reply.status == 200, reply
    eventually(lambda: demo.call("GET", "/v1/placements").body["data"] == [], CALL_S)
    return demo


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@contextmanager
def stalled_start(node: Node) -> Generator[None]:
    """Suspends the next runner that the node starts for longer than a heartbeat."""
    process, ended = psutil.Process(node.process.pid), threading.Event()
    before = process.children()

    def hold() -> None:
        while not (new_runners := [c for c in process.children() if c not in before]):
            if ended.wait(0.02):
                return
        new_runners[0].suspend()
        _ = ended.wait(STANDS_S)
        new_runners[0].resume()

    thread = threading.Thread(target=hold, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


Lines = Iterator[str]
"""The lines of a stream, after one that marks the sending of its request."""


def lines(streaming: Any) -> Lines:
    """The lines of a response that a typed client streams."""
    yield "data: sent"
    with streaming as response:
        yield from response.iter_lines()


def chat(node: Node, closing: ExitStack) -> Lines:
    completions = openai(node, closing).chat.completions.with_streaming_response
    return lines(completions.create(model="demo", messages=ASK, stream=True))


def responses(node: Node, closing: ExitStack) -> Lines:
    client = openai(node, closing).responses.with_streaming_response
    return lines(client.create(model="demo", input="Who are you?", stream=True))


def openai(node: Node, closing: ExitStack) -> Any:
    url = f"http://127.0.0.1:{node.port}/v1"
    return closing.enter_context(OpenAI(base_url=url, api_key="any", max_retries=0))


def messages(node: Node, closing: ExitStack) -> Lines:
    anthropic: Any = pytest.importorskip("anthropic")
    url = f"http://127.0.0.1:{node.port}"
    client = closing.enter_context(anthropic.Anthropic(base_url=url, api_key="any", max_retries=0))
    client_messages = client.messages.with_streaming_response
    return lines(client_messages.create(model="demo", max_tokens=50, messages=ASK, stream=True))


def ollama(node: Node, closing: ExitStack) -> Lines:
    client: Any = pytest.importorskip("ollama").Client(host=f"http://127.0.0.1:{node.port}")
    closing.callback(client._client.close)
    yield "data: sent"
    for part in client.chat(model="demo", messages=ASK, stream=True):
        yield f"data: {part.message.content or 'heartbeat'}"


HEARTBEATS: dict[str, tuple[Callable[[Node, ExitStack], Lines], str]] = {
    "chat": (chat, '"delta":{}'),
    "responses": (responses, '"type":"response.in_progress"'),
    "messages": (messages, '"type":"ping"'),
    "ollama": (ollama, "heartbeat"),
}


@pytest.mark.parametrize("dialect", HEARTBEATS)
def test_a_client_gets_data_while_the_model_is_loaded(
    cold: Node, closing: ExitStack, dialect: str
) -> None:
    client, heartbeat = HEARTBEATS[dialect]
    times: list[float] = []
    heartbeats: list[float] = []
    with stalled_start(cold):
        for line in client(cold, closing):
            if line.startswith("data: "):
                times.append(time.monotonic())
                heartbeats += [times[-1]] if heartbeat in line.replace(" ", "") else []
    gaps = [later - sooner for sooner, later in pairwise(times)]
    assert max(gaps) < IDLE_LIMIT_S
    assert heartbeats and heartbeats[0] - times[0] < IDLE_LIMIT_S
