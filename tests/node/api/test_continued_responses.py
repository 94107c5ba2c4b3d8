"""Responses that a next request continues or refers to, as OpenAI's client asks for it."""

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import pytest
from fakes import FINISHED, hangs, says
from http_node import ASK, Node, serving_fakes
from openai import BadRequestError, NotFoundError

from exo_node.node.api.http import bodies
from exo_node.node.api.responses.response_memory import ResponseMemory, pack
from exo_node.node.chat.requests import CallPart, Finished, ReasoningDelta, Started, TextDelta
from exo_node.node.trust.api_tokens import ApiTokens
from exo_node.node.trust.local_token import LocalToken
from exo_node.node.trust.token_file import create_token
from exo_node.placement.errors import InvalidRequest, PeerLost, PreviousResponseNotFound

PATH = "/v1/responses"
BODY: dict[str, Any] = {"model": "demo", "input": "hi"}
TOOLS: Any = [{"type": "function", "name": "look", "parameters": {"type": "object"}}]
CALL = CallPart(name="look", arguments='{"at": "a"}', ends=True)
EVENTS = (Started((1,)), ReasoningDelta("hm"), TextDelta("I look.", (2,)), CALL, FINISHED)
SAID = (Started((1,)), TextDelta("so ", (2,)), TextDelta("far", (3,)))


def texts(node: Node) -> list[Any]:
    return [message["content"] for message in node.chat.requests[-1].messages]


def create(openai: Any, **fields: Any) -> Any:
    """The response, whether it is streamed or not."""
    created = openai.responses.create(**{**BODY, **fields})
    return list(created)[-1].response if fields.get("stream") else created


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("store", [True, None])
def test_a_continued_conversation_is_the_one_that_is_sent_whole(
    node: Node, openai: Any, store: bool | None, stream: bool
) -> None:
    """Microsoft's agent-framework sends a tool's result alone, and no `store`."""
    fields: dict[str, Any] = {"store": store, "stream": stream}
    node.chat.scripts["demo"] = says(*EVENTS)
    first = create(openai, **fields, input="first", instructions="Be kind.", tools=TOOLS)
    result = {
        "type": "function_call_output",
        "call_id": first.output[-1].call_id,
        "output": "a tree",
    }
    second = create(openai, **fields, input=[result], tools=TOOLS, previous_response_id=first.id)
    assert (second.previous_response_id, second.store) == (first.id, True)
    more = {"input": "third", "instructions": "Be brief.", "previous_response_id": second.id}
    _ = create(openai, **fields, **more)
    continued = node.chat.requests[-1].messages
    turns: list[Any] = [{"role": "user", "content": "first"}, *_items(first), result]
    turns += [*_items(second), {"role": "user", "content": "third"}]
    _ = create(openai, input=turns, instructions="Be brief.")
    assert continued == node.chat.requests[-1].messages
    assert continued[0] == {"role": "system", "content": "Be brief."}
    assert "Be kind" not in str(continued)


def _items(response: Any) -> list[Any]:
    return [item.to_dict() for item in response.output]


@pytest.mark.parametrize("stream", [False, True])
def test_references_are_the_items_that_they_name(node: Node, openai: Any, stream: bool) -> None:
    """The AI SDK sends earlier items of the assistant so, and OpenAI lets the type be left out."""
    node.chat.scripts["demo"] = says(*EVENTS)
    first = create(openai, stream=stream, tools=TOOLS)
    items = _items(first)
    result = {"type": "function_call_output", "call_id": items[-1]["call_id"], "output": "a tree"}
    references: list[Any] = [{"type": "item_reference", "id": item["id"]} for item in items]
    references[0] = {"id": items[0]["id"]}
    references[1] = {"type": None, "id": items[1]["id"]}
    second = create(openai, input=[*ASK, *references, result], tools=TOOLS, stream=stream)
    referred = node.chat.requests[-1].messages
    _ = create(openai, input=[*ASK, *items, result], tools=TOOLS, store=False)
    assert len(referred) == 3 and referred == node.chat.requests[-1].messages
    _ = create(openai, previous_response_id=second.id)
    assert node.chat.requests[-1].messages[:3] == referred, "the second has the items themselves"


@pytest.mark.parametrize("id", ["item_0123456789abcdef01234567_0", "msg_abc", "", "item_x_1"])
def test_a_reference_to_nothing_is_refused_by_its_place(node: Node, openai: Any, id: str) -> None:
    reference = {"type": "item_reference", "id": create(openai).output[0].id}
    with pytest.raises(BadRequestError) as caught:
        _ = create(openai, input=[reference, {"type": "item_reference", "id": id}, *ASK])
    assert caught.value.param == "input[1].id" and f"no item '{id}'" in caught.value.message
    assert "send the item itself" in caught.value.message
    assert len(node.chat.requests) == 1


def test_a_response_that_must_not_be_kept_is_not(openai: Any) -> None:
    lost = create(openai, store=False)
    assert lost.store is False
    with pytest.raises(BadRequestError) as caught:
        _ = create(openai, previous_response_id=lost.id)
    assert caught.value.code == "previous_response_not_found"
    assert caught.value.param == "previous_response_id"
    assert "send the whole conversation as 'input'" in caught.value.message
    with pytest.raises(BadRequestError, match="no item"):
        _ = create(openai, input=[{"type": "item_reference", "id": lost.output[0].id}])


def test_no_response_is_read_deleted_or_followed(openai: Any) -> None:
    id = create(openai, store=True).id
    for call in (
        openai.responses.retrieve,
        openai.responses.delete,
        openai.responses.cancel,
        openai.responses.input_items.list,
    ):
        with pytest.raises(NotFoundError, match="does not serve"):
            _ = call(id)


def test_a_call_that_was_cut_is_not_continued(node: Node, openai: Any) -> None:
    cut = CallPart(name="", arguments="", ends=True, is_cut=True)
    length = Finished("length", 3, 3, 2, 1, FINISHED.stats)
    call = CallPart(name="look", arguments='{"a')
    node.chat.scripts["demo"] = says(Started((1,)), call, cut, length)
    first = create(openai, stream=True, tools=TOOLS)
    assert (first.status, first.output[-1].type) == ("incomplete", "function_call")
    _ = create(openai, input="two", previous_response_id=first.id)
    assert [message["role"] for message in node.chat.requests[-1].messages] == ["user", "user"]


def test_what_a_client_has_seen_of_an_answer_that_it_left_is_continued(
    node: Node, openai: Any
) -> None:
    node.chat.scripts["demo"] = hangs(*SAID)
    with openai.responses.create(**BODY, stream=True) as stream:
        events: list[Any] = [next(stream)]
        while getattr(events[-1], "delta", "") != "far":
            events.append(next(stream))
    assert node.chat.closed.wait(60)
    node.chat.scripts["demo"] = says(Started((1,)), FINISHED)
    _ = create(openai, input="on", previous_response_id=events[0].response.id)
    assert texts(node) == ["hi", "so far", "on"]
    reference = {"type": "item_reference", "id": events[-1].item_id}
    _ = create(openai, input=[*ASK, reference, {"role": "user", "content": "on"}])
    assert texts(node) == ["hi", "so far", "on"]


def test_what_an_answer_said_before_it_failed_is_continued(node: Node, openai: Any) -> None:
    node.chat.scripts["demo"] = says(*SAID, then=PeerLost("a node is gone"))
    failed = create(openai, stream=True)
    assert (failed.status, failed.error.message) == ("failed", "a node is gone")
    node.chat.scripts["demo"] = says(Started((1,)), FINISHED)
    _ = create(openai, input="on", previous_response_id=failed.id)
    assert texts(node) == ["hi", "so far", "on"]
    node.chat.scripts["demo"] = says(Started((1,)), then=PeerLost("a node is gone"))
    silent = create(openai, stream=True)
    with pytest.raises(BadRequestError, match="no response"):
        _ = create(openai, previous_response_id=silent.id)


def test_a_response_is_its_tokens_own(tmp_path: Path) -> None:
    local = LocalToken(secrets.token_hex(32))
    with serving_fakes(tokens=ApiTokens(tmp_path), token=local) as node:
        early = node.ask("POST", PATH, BODY).json
        one, two = (
            {"Authorization": f"Bearer {create_token(tmp_path, name)}"} for name in ("one", "two")
        )
        late = node.ask("POST", PATH, BODY, one).json
        for response, headers, status in ((early, two, 400), (late, two, 400), (late, one, 200)):
            reference = [{"type": "item_reference", "id": response["output"][0]["id"]}]
            for fields in ({"previous_response_id": response["id"]}, {"input": reference}):
                reply = node.ask("POST", PATH, {**BODY, **fields}, headers)
                assert reply.status == status, (response, fields)


def test_a_conversation_of_too_many_items_is_refused(
    openai: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "MAX_HISTORY", 4)
    many = [{"role": "user", "content": "x"}] * 2
    first = create(openai, input=many)
    second = create(openai, input=many, previous_response_id=first.id)
    with pytest.raises(BadRequestError, match="begin another") as caught:
        _ = create(openai, previous_response_id=second.id)
    assert caught.value.param == "previous_response_id"


Add = Callable[[str, str, int], None]


def remembering(memory: ResponseMemory, work: Callable[[Add], Awaitable[None]]) -> None:
    """Runs `work` in a loop, with a function that adds a response of an owner and a size."""

    def add(id: str, owner: str, size: int) -> None:
        memory.add(id, owner, (bytes(size),), [])

    async def run() -> None:
        await work(add)

    asyncio.run(run())


def known(memory: ResponseMemory, ids: str, owner: str = "") -> str:
    """The ids, of one letter each, that the owner can continue."""

    def is_known(id: str) -> bool:
        try:
            return bool(memory.conversation(id, owner))
        except PreviousResponseNotFound:
            return False

    return "".join(filter(is_known, ids))


def test_the_oldest_responses_of_the_owner_with_the_most_make_room() -> None:
    memory = ResponseMemory(max_bytes=1_000_000)

    async def work(add: Add) -> None:
        add("x", "small", 100_000)
        for id in "abcdefgh":
            add(id, "large", 200_000)
        assert known(memory, "abcdefgh", "large") == "efgh"
        add("y", "small", 10)
        assert known(memory, "abcdefgh", "large") == "efgh"
        add("i", "large", 2_000_000)
        assert known(memory, "abcdefghi", "large") == "", "it would not fit alone"
        for id in ascii_lowercase.upper():
            add(id, "third", 10)
        assert known(memory, "xy", "small") == "xy"
        assert known(memory, ascii_lowercase.upper(), "third") == "NOPQRSTUVWXYZ", "64 kB each"

    remembering(memory, work)


def test_a_response_is_forgotten_after_its_time() -> None:
    memory = ResponseMemory(age_s=0.01)

    async def work(add: Add) -> None:
        add("a", "", 10)
        assert known(memory, "a") == "a"
        while known(memory, "a"):
            await asyncio.sleep(0.001)

    remembering(memory, work)


def test_a_conversation_that_is_too_long_is_refused() -> None:
    memory = ResponseMemory(max_conversation=3000)
    part = pack([{"content": "x" * 2000}])
    assert memory.unpack([part], "input") == [{"content": "x" * 2000}]
    for parts in ([part, part], [pack([{"content": "x" * 9000}])]):
        with pytest.raises(InvalidRequest, match="more than 3000 bytes") as caught:
            _ = memory.unpack(parts, "input")
        assert caught.value.param == "input"
