"""Continued responses of a real node, and what an earlier version left on its disk."""

from pathlib import Path
from typing import Any

from nodes import Node, node

FIELDS: dict[str, Any] = {"model": "demo", "temperature": 0, "max_output_tokens": 40}


def respond(running: Node, text: Any, **fields: Any) -> Any:
    reply = running.call("POST", "/v1/responses", {**FIELDS, "input": text, **fields})
    assert reply.status == 200, reply
    return reply.body


def test_a_continued_response_reads_only_what_is_new_and_says_what_the_whole_would(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "node"
    (folder / "responses").mkdir(parents=True)
    for ending in ("", "-journal", ".damaged-17"):
        _ = (folder / "responses" / f"responses.db{ending}").write_text("a conversation")
    with node(folder, "--no-mdns", "--dtype", "float32") as running:
        assert not (folder / "responses").exists()
        assert running.log.read_text().count("no longer stored on the disk") == 3
        _continue(running)
        assert "quick brown" not in running.log.read_text()
    assert not (folder / "responses").exists()


def _continue(demo: Node) -> None:
    prompt = f"{'The quick brown fox jumps over the lazy dog. ' * 20}Who are you?"
    first = respond(demo, prompt, store=True)
    second = respond(demo, "And who made you?", previous_response_id=first["id"])
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
