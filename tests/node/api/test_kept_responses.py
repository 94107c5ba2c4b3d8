"""Responses whose requests do not name `store`: kept in memory, continued, and referred to."""

import secrets
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from fakes import FINISHED, hangs, says
from http_node import ASK, Node, serving_fakes
from openai import BadRequestError, NotFoundError
from stored import serving_stored, store_in

from exo_node.node.chat.requests import CallPart, ReasoningDelta, Started, TextDelta
from exo_node.node.trust.api_tokens import ApiTokens
from exo_node.node.trust.local_token import LocalToken
from exo_node.node.trust.token_file import create_token

PATH = "/v1/responses"
BODY: dict[str, Any] = {"model": "demo", "input": "hi"}
TOOLS: Any = [{"type": "function", "name": "look", "parameters": {"type": "object"}}]
CALL = CallPart("look", '{"at": "a"}', ends=True)
EVENTS = (Started((1,)), ReasoningDelta("hm"), TextDelta("I look.", (2,)), CALL, FINISHED)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def running(folder: Path) -> Generator[Node]:
    with serving_stored(store_in(folder)) as node:
        yield node


@pytest.mark.parametrize("store", [{}, {"store": None}], ids=str)
@pytest.mark.parametrize("stream", [False, True])
def test_a_response_whose_request_does_not_say_is_read_and_deleted(
    openai: Any, folder: Path, store: dict[str, Any], stream: bool
) -> None:
    asked = openai.responses.create(model="demo", input="hi", stream=stream, **store)
    created = list(asked)[-1].response if stream else asked
    assert created.store is True
    assert openai.responses.retrieve(created.id).to_dict() == created.to_dict()
    assert len(openai.responses.input_items.list(created.id).data) == 1
    openai.responses.delete(created.id)
    with pytest.raises(NotFoundError):
        _ = openai.responses.retrieve(created.id)
    assert list(folder.iterdir()) == [], "nothing is on the disk"


def test_a_tools_result_continues_such_a_response(node: Node, openai: Any, folder: Path) -> None:
    """Microsoft's agent-framework sends the result alone, and no `store`."""
    node.chat.scripts["demo"] = says(*EVENTS)
    first = openai.responses.create(model="demo", input="first", tools=TOOLS)
    result = {
        "type": "function_call_output",
        "call_id": first.output[-1].call_id,
        "output": "a tree",
    }
    second = openai.responses.create(
        model="demo", input=[result], tools=TOOLS, previous_response_id=first.id
    )
    continued = node.chat.requests[-1].messages
    whole: list[Any] = [{"role": "user", "content": "first"}]
    whole += [item.to_dict() for item in first.output] + [result]
    _ = openai.responses.create(model="demo", input=whole, tools=TOOLS, store=False)
    assert continued == node.chat.requests[-1].messages
    assert second.previous_response_id == first.id
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("stream", [False, True])
def test_references_are_the_items_that_they_name(node: Node, openai: Any, stream: bool) -> None:
    """The AI SDK sends earlier items of the assistant so, and OpenAI lets the type be left out."""
    node.chat.scripts["demo"] = says(*EVENTS)
    first = openai.responses.create(model="demo", input="first", tools=TOOLS)
    items = [item.to_dict() for item in first.output]
    result = {"type": "function_call_output", "call_id": items[-1]["call_id"], "output": "a tree"}
    question = {"role": "user", "content": "first"}
    references = [{"type": "item_reference", "id": item["id"]} for item in items]
    references[0] = {"id": items[0]["id"]}
    references[1] = {"type": None, "id": items[1]["id"]}
    created = openai.responses.create(
        model="demo", input=[question, *references, result], tools=TOOLS, stream=stream
    )
    second = list(created)[-1].response if stream else created
    referred = node.chat.requests[-1].messages
    _ = openai.responses.create(
        model="demo", input=[question, *items, result], tools=TOOLS, store=False
    )
    assert len(referred) == 3 and referred == node.chat.requests[-1].messages
    openai.responses.delete(first.id)
    listed = openai.responses.input_items.list(second.id, order="asc").data
    assert [item.type for item in listed] == [
        "message",
        "reasoning",
        "message",
        "function_call",
        "function_call_output",
    ], "the second response has the items themselves"
    again = {"type": "item_reference", "id": listed[0].id}
    _ = openai.responses.create(model="demo", input=[again])
    assert node.chat.requests[-1].messages == ({"role": "user", "content": "first"},)


@pytest.mark.parametrize("id", ["item_0123456789abcdef01234567_0", "msg_abc", "", "item_x_1"])
def test_a_reference_to_nothing_is_refused_by_its_place(node: Node, openai: Any, id: str) -> None:
    kept = openai.responses.create(model="demo", input="hi")
    known = {"type": "item_reference", "id": kept.output[0].id}
    with pytest.raises(BadRequestError) as caught:
        _ = openai.responses.create(
            model="demo", input=[known, {"type": "item_reference", "id": id}, *ASK]
        )
    assert caught.value.param == "input[1].id" and f"no item '{id}'" in caught.value.message
    assert "send the item itself" in caught.value.message
    assert len(node.chat.requests) == 1


def test_an_item_of_a_response_that_was_not_kept_is_refused(openai: Any) -> None:
    created = openai.responses.create(model="demo", input="hi", store=False)
    with pytest.raises(BadRequestError, match="no item"):
        _ = openai.responses.create(
            model="demo", input=[{"type": "item_reference", "id": created.output[0].id}]
        )


@pytest.mark.parametrize(("first", "second"), [(None, True), (True, None)])
def test_what_is_stored_and_what_is_not_continue_each_other(
    node: Node, openai: Any, first: bool | None, second: bool | None
) -> None:
    one = openai.responses.create(model="demo", input="one", store=first)
    two = openai.responses.create(
        model="demo", input="two", store=second, previous_response_id=one.id
    )
    openai.responses.delete(one.id)
    _ = openai.responses.create(model="demo", input="three", previous_response_id=two.id)
    texts = [message["content"] for message in node.chat.requests[-1].messages]
    assert texts == ["one", "héllo", "two", "héllo", "three"]
    assert len(openai.responses.input_items.list(two.id).data) == 3


def test_a_kept_response_is_its_tokens_own(tmp_path: Path) -> None:
    local = LocalToken(secrets.token_hex(32))
    options: dict[str, Any] = {"tokens": ApiTokens(tmp_path), "token": local}
    with serving_stored(store_in(tmp_path), **options) as node:
        one, two = (
            {"Authorization": f"Bearer {create_token(tmp_path, name)}"} for name in ("one", "two")
        )
        created = node.ask("POST", PATH, BODY, one).json
        id, item = created["id"], created["output"][0]["id"]
        for method, path in (("GET", id), ("GET", f"{id}/input_items"), ("DELETE", id)):
            assert node.ask(method, f"{PATH}/{path}", None, two).status == 404
        reply = node.ask("POST", PATH, {**BODY, "previous_response_id": id}, two)
        assert reply.error["code"] == "previous_response_not_found"
        reference = {**BODY, "input": [{"type": "item_reference", "id": item}]}
        assert node.ask("POST", PATH, reference, two).error["param"] == "input[0].id"
        assert node.ask("POST", PATH, reference, one).status == 200


def test_an_answer_ends_with_its_client(node: Node, openai: Any) -> None:
    node.chat.scripts["demo"] = hangs(Started((1,)), TextDelta("so", (2,)))
    stream = openai.responses.create(model="demo", input="hi", stream=True)
    _ = next(iter(stream))
    stream.close()
    assert node.chat.closed.wait(60)


def test_a_node_that_stores_nothing_keeps_nothing() -> None:
    with serving_fakes() as node:
        reply = node.ask("POST", PATH, BODY)
        assert (reply.status, reply.json["store"]) == (200, False)
        assert "store_error" not in reply.json
        reference = {**BODY, "input": [{"type": "item_reference", "id": "item_00_0"}]}
        refused = node.ask("POST", PATH, reference)
        assert (refused.status, refused.error["param"]) == (400, "input[0].id")
        assert "EXO_RESPONSES_GB=0" in refused.error["message"]
