"""Responses whose requests do not name `store`: kept in memory, continued, and referred to."""

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from fakes import FINISHED, says
from http_node import ASK, Node
from openai import BadRequestError, NotFoundError
from stored import serving_stored, store_in

from exo_node.node.chat.requests import CallPart, ReasoningDelta, Started, TextDelta

PATH = "/v1/responses"
BODY: dict[str, Any] = {"model": "demo", "input": "hi"}
TOOLS: Any = [{"type": "function", "name": "look", "parameters": {"type": "object"}}]
CALL = CallPart(name="look", arguments='{"at": "a"}', ends=True)
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
    stored = openai.responses.create(model="demo", input="hi")
    reference = {"type": "item_reference", "id": stored.output[0].id}
    with pytest.raises(BadRequestError) as caught:
        _ = openai.responses.create(
            model="demo", input=[reference, {"type": "item_reference", "id": id}, *ASK]
        )
    assert caught.value.param == "input[1].id" and f"no item '{id}'" in caught.value.message
    assert "send the item itself" in caught.value.message
    assert len(node.chat.requests) == 1
    lost = openai.responses.create(model="demo", input="hi", store=False).output[0].id
    with pytest.raises(BadRequestError, match="no item"):
        _ = openai.responses.create(model="demo", input=[{"type": "item_reference", "id": lost}])


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
