"""Stored responses where something is wrong: the disk, the node's end, the client's key."""

import asyncio
import json
import logging
import secrets
from collections.abc import Generator
from contextlib import closing, contextmanager
from dataclasses import replace
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

import pytest
from fakes import ANSWER, hangs, repeats, says
from http_node import PATIENCE_S, Node, Reply, serving_fakes
from nodes import eventually
from stored import LIMITS, Gate, serving_stored, store_in

from exo_node.node.api.http.drain import Drain
from exo_node.node.api.responses.response_runs import MAX_RUNS
from exo_node.node.chat.requests import AnswerProgress, Started, TextDelta
from exo_node.node.machine.timing import LOCAL
from exo_node.node.responses.store import EndedResponse, ResponseStore
from exo_node.node.trust.api_tokens import ApiTokens
from exo_node.node.trust.local_token import LocalToken
from exo_node.node.trust.token_file import create_token
from exo_node.placement.errors import QueueFull, ResponsesUnavailable

PATH = "/v1/responses"
BODY: dict[str, Any] = {"model": "demo", "input": "hi", "store": True}


def events_of(reply: Reply) -> list[dict[str, Any]]:
    lines = reply.body.decode().splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: ")]


def until_ended(node: Node, id: str) -> Any:
    while (body := node.ask("GET", f"{PATH}/{id}").json)["status"] in ("queued", "in_progress"):
        pass
    return body


def test_an_answer_whose_folder_cannot_be_used_goes_out_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _ = (tmp_path / "responses").write_text("in the way")
    with serving_stored(store_in(tmp_path)) as node:
        reply = node.ask("POST", PATH, BODY)
        assert reply.status == 200 and reply.json["output"]
        assert reply.json["store"] is False and "cannot be used" in reply.json["store_error"]
        assert reply.headers["x-exo-node-ignored"] == "store"
        last = events_of(node.ask("POST", PATH, {**BODY, "stream": True}))[-1]
        assert last["type"] == "response.completed"
        assert "cannot be used" in last["response"]["store_error"]
        refused = node.ask("POST", PATH, {**BODY, "background": True})
        assert (refused.status, refused.error["code"]) == (503, "responses_unavailable")
        assert node.ask("GET", f"{PATH}/resp_x").status in (404, 503)
    assert (tmp_path / "responses").read_text() == "in the way"
    assert "Traceback" not in caplog.text and "'hi'" not in caplog.text


class FullAtTheEnd(ResponseStore):
    """A store whose disk is full when an answer ends."""

    async def finish(self, id: str, end: EndedResponse) -> None:
        raise ResponsesUnavailable("the disk is full")


def test_a_background_answer_whose_end_cannot_be_stored_is_read_until_the_node_stops(
    tmp_path: Path,
) -> None:
    store = FullAtTheEnd(tmp_path / "r", LIMITS, patience_s=60, max_conversation=1000)
    with serving_stored(store) as node:
        id = node.ask("POST", PATH, {**BODY, "background": True}).json["id"]
        ended = until_ended(node, id)
        assert (ended["status"], ended["store"]) == ("completed", False)
        assert ended["store_error"] == "the disk is full"
        stream = events_of(node.ask("GET", f"{PATH}/{id}?stream=true"))
        assert stream[-1]["response"] == ended
        assert node.ask("DELETE", f"{PATH}/{id}").status == 200
        assert node.ask("GET", f"{PATH}/{id}").status == 404
    again = store_in(tmp_path)
    asyncio.run(again.close())


def test_an_answer_whose_end_was_not_stored_has_failed(tmp_path: Path) -> None:
    store = FullAtTheEnd(tmp_path / "responses", LIMITS, patience_s=60, max_conversation=1000)
    with serving_stored(store) as node:
        id = node.ask("POST", PATH, {**BODY, "background": True}).json["id"]
        _ = until_ended(node, id)
    with serving_stored(store_in(tmp_path)) as node:
        body = node.ask("GET", f"{PATH}/{id}").json
        assert (body["status"], body["error"]["code"]) == ("failed", "server_error")
        assert "was not stored" in body["error"]["message"]
        (event,) = events_of(node.ask("GET", f"{PATH}/{id}?stream=true&starting_after=7"))
        assert (event["type"], event["sequence_number"]) == ("response.failed", 8)
        cancelled = node.ask("POST", f"{PATH}/{id}/cancel", {})
        assert (cancelled.status, cancelled.json["status"]) == (200, "failed")


def test_a_background_answer_that_is_cut_off_by_the_nodes_end_is_stored_as_failed(
    tmp_path: Path,
) -> None:
    leaving = Drain(LOCAL)
    with serving_stored(store_in(tmp_path), leaving) as node:
        node.chat.scripts["demo"] = hangs(Started((1,)), TextDelta("so", (2,)))
        id = node.ask("POST", PATH, {**BODY, "background": True}).json["id"]
        assert node.chat.began.wait(60)
        eventually(lambda: leaving.running == 1, PATIENCE_S)  # a stopping node waits for it
        leaving.cut_off()
        body = until_ended(node, id)
        assert (body["status"], body["error"]["code"]) == ("failed", "peer_lost")
        assert leaving.running == 0


def test_a_node_that_stores_nothing_says_so() -> None:
    with serving_fakes() as node:
        reply = node.ask("POST", PATH, BODY)
        assert (reply.status, reply.json["store"]) == (200, False)
        assert "EXO_RESPONSES_GB=0" in reply.json["store_error"]
        assert reply.headers["x-exo-node-ignored"] == "store"
        for param, fields in (
            ("background", {"background": True}),
            ("previous_response_id", {"previous_response_id": "resp_1"}),
            ("input[0].id", {"input": [{"type": "item_reference", "id": "item_00_0"}]}),
        ):
            refused = node.ask("POST", PATH, {**BODY, **fields})
            assert (refused.status, refused.error["param"]) == (400, param)
            assert "EXO_RESPONSES_GB=0" in refused.error["message"]
        silent = node.ask("POST", PATH, {**BODY, "store": None}).json
        assert silent["store"] is False and "store_error" not in silent
        assert node.ask("GET", f"{PATH}/resp_1").status == 404


@pytest.mark.parametrize("store", [True, None])
def test_a_response_is_its_tokens_own(tmp_path: Path, store: bool | None) -> None:
    local = LocalToken(secrets.token_hex(32))
    options: dict[str, Any] = {"tokens": ApiTokens(tmp_path), "token": local}
    with serving_stored(store_in(tmp_path), **options) as node:
        body = {**BODY, "store": store}
        early = node.ask("POST", PATH, body).json["id"]
        other = node.ask("POST", PATH, body).json["id"]
        assert node.ask("DELETE", f"{PATH}/{other}").status == 200, "a client without any key"
        one, two = (
            {"Authorization": f"Bearer {create_token(tmp_path, name)}"} for name in ("one", "two")
        )
        created = node.ask("POST", PATH, body, one).json
        finished, item = created["id"], created["output"][0]["id"]
        reference = {**body, "input": [{"type": "item_reference", "id": item}]}
        assert node.ask("POST", PATH, reference, two).error["param"] == "input[0].id"
        assert node.ask("POST", PATH, reference, one).status == 200
        node.chat.scripts["demo"] = hangs(Started((1,)))
        running = node.ask("POST", PATH, {**BODY, "background": True}, one).json["id"]
        for id in (early, finished, running):
            for method, path in (
                ("GET", id),
                ("GET", f"{id}?stream=true"),
                ("GET", f"{id}/input_items"),
                ("DELETE", id),
                ("POST", f"{id}/cancel"),
            ):
                assert node.ask(method, f"{PATH}/{path}", b"", two).status == 404
            reply = node.ask("POST", PATH, {**BODY, "previous_response_id": id}, two)
            assert reply.error["code"] == "previous_response_not_found"
        assert node.ask("GET", f"{PATH}/{finished}", headers=one).status == 200
        assert node.ask("POST", f"{PATH}/{running}/cancel", {}, one).json["status"] == "cancelled"


def test_answers_in_the_background_are_bounded(tmp_path: Path) -> None:
    tokens: dict[str, Any] = {
        "tokens": ApiTokens(tmp_path),
        "token": LocalToken(secrets.token_hex(32)),
    }
    with serving_stored(store_in(tmp_path), **tokens) as node:
        node.chat.scripts["demo"] = hangs(Started((1,)))
        body = {**BODY, "background": True}
        ids = [node.ask("POST", PATH, body).json["id"] for _ in range(MAX_RUNS)]
        refused = node.ask("POST", PATH, body)
        assert (refused.status, refused.error["code"]) == (429, "queue_full")
        assert node.ask("POST", f"{PATH}/{ids[0]}/cancel", {}).json["status"] == "cancelled"
        assert node.ask("POST", PATH, body).status == 200
        other = {"Authorization": f"Bearer {create_token(tmp_path, 'other')}"}
        assert node.ask("POST", PATH, body, other).status == 200


def test_an_answer_in_the_background_waits_for_a_place_in_a_full_queue(tmp_path: Path) -> None:
    with serving_stored(store_in(tmp_path)) as node:
        node.chat.scripts["demo"] = says(then=QueueFull("32 requests are waiting already"))
        assert node.ask("POST", PATH, BODY).status == 429
        id = node.ask("POST", PATH, {**BODY, "background": True}).json["id"]
        while len(node.chat.requests) < 4:
            assert node.ask("GET", f"{PATH}/{id}").json["status"] == "queued"
        node.chat.scripts["demo"] = says(*ANSWER)
        assert until_ended(node, id)["status"] == "completed"


def test_signs_of_life_are_no_events_of_the_answer(tmp_path: Path) -> None:
    gate = Gate(1)
    with serving_stored(store_in(tmp_path), keep_alive_s=0.02) as node:
        node.chat.scripts["demo"] = gate.script()
        with streaming(node, background=True) as lines:
            text = b""
            while text.count(b"event: response.in_progress") < 4:
                text += next(lines)
            gate.let(1)
            text += lines.read()
        events = [json.loads(line[6:]) for line in text.split(b"\n") if line.startswith(b"data: ")]
        numbers = [event["sequence_number"] for event in events]
        assert numbers == sorted(numbers)
        id = events[0]["response"]["id"]
        logged = events_of(node.ask("GET", f"{PATH}/{id}?stream=true"))
        assert [event["sequence_number"] for event in logged] == list(range(len(logged)))
        first_of_each = {event["sequence_number"]: event for event in reversed(events)}
        assert [first_of_each[number] for number in range(len(logged))] == logged
        assert len(events) > len(logged)


def test_a_stored_answer_that_waits_for_its_model_shows_life(tmp_path: Path) -> None:
    with serving_stored(store_in(tmp_path), keep_alive_s=0.02) as node:
        node.chat.scripts["demo"] = repeats(AnswerProgress("downloading 12 %"))
        with streaming(node) as lines:
            text = b""
            while b": downloading 12 %" not in text:
                text += next(lines)
        assert b"event: response.created" in text
        assert node.chat.closed.wait(60), "it ends with its client"


@contextmanager
def streaming(node: Node, **fields: Any) -> Generator[HTTPResponse]:
    """The answer to a stored request while it is streamed."""
    connection = HTTPConnection("127.0.0.1", node.port, timeout=PATIENCE_S)
    body = json.dumps({**BODY, "stream": True, **fields})
    connection.request("POST", PATH, body, {"Content-Type": "application/json"})
    with closing(connection), connection.getresponse() as response:
        assert response.status == 200
        yield response


def test_a_response_without_room_is_answered_and_others_stay(tmp_path: Path) -> None:
    store = store_in(tmp_path, replace(LIMITS, bytes=200_000))
    with serving_stored(store) as node:
        stored = node.ask("POST", PATH, BODY).json["id"]
        large = secrets.token_hex(400_000)
        reply = node.ask("POST", PATH, {**BODY, "input": large})
        assert reply.status == 200 and "EXO_RESPONSES_GB" in reply.json["store_error"]
        assert node.ask("GET", f"{PATH}/{stored}").status == 200


def test_a_conversation_that_is_too_long_is_refused(tmp_path: Path) -> None:
    with serving_stored(store_in(tmp_path, max_conversation=3000)) as node:
        first = node.ask("POST", PATH, {**BODY, "input": "x" * 5000}).json["id"]
        reply = node.ask("POST", PATH, {**BODY, "previous_response_id": first})
        assert (reply.status, reply.error["param"]) == (400, "previous_response_id")
        assert "more than 3000 bytes" in reply.error["message"]


def test_an_answer_with_a_defect_fails_and_stays_failed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with serving_stored(store_in(tmp_path)) as node:
        defect = ValueError("a defect")
        node.chat.scripts["demo"] = says(Started((1,)), then=defect)
        id = node.ask("POST", PATH, {**BODY, "background": True}).json["id"]
        body = until_ended(node, id)
        assert (body["status"], body["error"]["code"]) == ("failed", "internal_error")
        assert "a defect" not in body["error"]["message"]
    assert logging.ERROR in [record.levelno for record in caplog.records]
