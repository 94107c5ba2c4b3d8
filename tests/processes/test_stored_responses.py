"""Stored responses of real nodes: continued conversations, and nodes that end under an answer."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from nodes import CALL_S, Node, eventually, node

PATH = "/v1/responses"
PROMPT = "Who are you?"
FIELDS: dict[str, Any] = {"model": "demo", "temperature": 0, "max_output_tokens": 40}
ENDS = ("completed", "incomplete", "failed", "cancelled")


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp("demo")
    with node(folder, "--no-mdns", "--dtype", "float32") as running:
        yield running


def respond(running: Node, text: Any = PROMPT, **fields: Any) -> Any:
    reply = running.call("POST", PATH, {**FIELDS, "input": text, **fields})
    assert reply.status == 200, reply
    return reply.body


def read(running: Node, id: str) -> Any:
    reply = running.call("GET", f"{PATH}/{id}")
    assert reply.status == 200, reply
    return reply.body


def await_end(running: Node, id: str) -> Any:
    eventually(lambda: read(running, id)["status"] in ENDS, CALL_S)
    return read(running, id)


def test_a_continued_response_reads_only_what_is_new_and_says_what_the_whole_would(
    demo: Node,
) -> None:
    prompt = f"{'The quick brown fox jumps over the lazy dog. ' * 20}{PROMPT}"
    first = respond(demo, prompt, store=True)
    second = respond(demo, "And who made you?", store=True, previous_response_id=first["id"])
    third = respond(demo, "Thanks.", previous_response_id=second["id"])
    turns = [{"role": "user", "content": prompt}, *first["output"]]
    turns += [{"role": "user", "content": "And who made you?"}]
    whole = respond(demo, turns, cache=False)
    assert second["output"][0]["content"] == whole["output"][0]["content"]
    assert whole["usage"]["input_tokens_details"]["cached_tokens"] == 0
    messages = [
        {"role": each["role"], "content": _text(each)}
        for each in [*turns, *second["output"], {"role": "user", "content": "Thanks."}]
    ]
    for response, turn in ((first, 1), (second, 3), (third, 5)):
        body = {"model": "demo", "messages": messages[:turn]}
        ids = demo.call("POST", "/v1/tokenize", body).body["tokens"]
        assert response["usage"]["input_tokens"] == len(ids)
        cached = response["usage"]["input_tokens_details"]["cached_tokens"]
        assert cached > 128 or turn == 1


def _text(item: dict[str, Any]) -> str:
    content = item["content"]
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def test_a_node_that_stops_lets_a_background_answer_end(tmp_path: Path) -> None:
    folder = tmp_path / "node"
    with node(folder, "--no-mdns") as running:
        _ = respond(running)  # loads the model
        ids = [respond(running, store=True, background=True)["id"] for _ in range(8)]
        assert running.stop() == 0
        assert "Traceback" not in running.log.read_text()
    with node(folder, "--no-mdns") as running:
        for id in ids:
            response = read(running, id)
            assert response["status"] in ("completed", "incomplete"), response
            assert response["output"]


def test_a_killed_nodes_answers_are_stored_if_they_had_ended_and_failed_if_not(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "node"
    ended: list[str] = []
    with node(folder, "--no-mdns") as running:
        _ = respond(running)

        def ask(number: int) -> None:
            with suppress(OSError, ValueError):  # from the kill on
                ended.append(respond(running, f"Say {number}.", store=True)["id"])

        with ThreadPoolExecutor(4) as pool:
            _ = [pool.submit(ask, number) for number in range(400)]
            eventually(lambda: len(ended) >= 8, CALL_S)
            answer = respond(running, "Count to a thousand.", store=True, background=True)["id"]
            running.process.kill()
            pool.shutdown(cancel_futures=True)
    (folder / "node.json").unlink()  # of the process that was killed
    with node(folder, "--no-mdns") as running:
        response = await_end(running, answer)
        assert response["status"] == "failed"
        assert "the node stopped meanwhile" in response["error"]["message"]
        for id in ended:
            assert read(running, id)["status"] in ("completed", "incomplete")
        again = respond(running, "Go on.", store=True, previous_response_id=ended[0])
        assert read(running, again["id"])["output"] == again["output"]
        log = running.log.read_text()
        assert "Traceback" not in log and "damaged" not in log and "Count to" not in log
    names = {each.name for each in (folder / "responses").iterdir()}
    assert names == {"responses.db"}
