"""Stored responses as OpenAI's client uses them, over a real server and a real file."""

from collections.abc import Generator
from typing import Any

import pytest
from fakes import FINISHED, hangs, says
from http_node import Node
from openai import BadRequestError, NotFoundError
from stored import Gate, serving_stored, store_in

from exo_node.node.chat.requests import CallPart, Finished, ReasoningDelta, Started, TextDelta
from exo_node.placement.errors import PeerLost

FIELDS: dict[str, Any] = {"model": "demo", "store": True}
ENDS = ("completed", "failed", "incomplete", "cancelled")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Generator[Node]:
    with serving_stored(store_in(tmp_path_factory.mktemp("data"))) as node:
        yield node


def ended(openai: Any, id: str) -> Any:
    """The response, once it has ended."""
    while (response := openai.responses.retrieve(id)).status not in ENDS:
        pass
    return response


def test_a_stored_response_is_read_as_it_was_answered(openai: Any) -> None:
    created = openai.responses.create(**FIELDS, input="hi", metadata={"a": "b"})
    assert created.output_text == "héllo" and created.to_dict()["store"] is True
    assert openai.responses.retrieve(created.id).to_dict() == created.to_dict()
    events = list(openai.responses.create(**FIELDS, input="hi", stream=True))
    last: Any = events[-1]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert openai.responses.retrieve(last.response.id).to_dict() == last.response.to_dict()


def test_a_response_that_must_not_be_stored_is_not(openai: Any) -> None:
    created: Any = openai.responses.create(model="demo", input="hi", store=False)
    assert created.store is False
    with pytest.raises(NotFoundError) as caught:
        _ = openai.responses.retrieve(created.id)
    assert caught.value.code == "response_not_found"
    assert "or on another node" in caught.value.message


CALL = CallPart(name="look", arguments='{"at": "a"}', ends=True)
TOOLS: Any = [{"type": "function", "name": "look", "parameters": {"type": "object"}}]


@pytest.mark.parametrize("store", [True, None])
def test_a_continued_conversation_is_the_one_that_is_sent_whole(
    node: Node, openai: Any, store: bool | None
) -> None:
    """Microsoft's agent-framework sends a tool's result alone, and no `store`."""
    fields: dict[str, Any] = {"model": "demo", "store": store}
    events = (Started((1,)), ReasoningDelta("hm"), TextDelta("I look.", (2,)), CALL, FINISHED)
    node.chat.scripts["demo"] = says(*events)
    turns: list[Any] = [{"role": "user", "content": "first"}]
    first = openai.responses.create(**fields, input="first", instructions="Be kind.", tools=TOOLS)
    call: Any = first.output[-1]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "a tree"}
    second = openai.responses.create(
        **fields, input=[result], tools=TOOLS, previous_response_id=first.id
    )
    assert second.previous_response_id == first.id
    _ = openai.responses.create(
        model="demo", input="third", instructions="Be brief.", previous_response_id=second.id
    )
    continued = node.chat.requests[-1].messages
    turns += [*_items(first), result, *_items(second), {"role": "user", "content": "third"}]
    _ = openai.responses.create(model="demo", input=turns, instructions="Be brief.")
    assert continued == node.chat.requests[-1].messages
    assert continued[0] == {"role": "system", "content": "Be brief."}
    assert "Be kind" not in str(continued)


def _items(response: Any) -> list[Any]:
    return [item.to_dict() for item in response.output]


def test_a_response_can_be_continued_when_an_earlier_one_was_deleted(
    node: Node, openai: Any
) -> None:
    first = openai.responses.create(**FIELDS, input="one")
    second = openai.responses.create(**FIELDS, input="two", previous_response_id=first.id)
    openai.responses.delete(first.id)
    third = openai.responses.create(**FIELDS, input="three", previous_response_id=second.id)
    texts = [message["content"] for message in node.chat.requests[-1].messages]
    assert texts == ["one", "héllo", "two", "héllo", "three"]
    items = openai.responses.input_items.list(third.id, order="asc", limit=2)
    assert [_text(item) for item in items] == texts
    assert [_text(item) for item in openai.responses.input_items.list(third.id)] == texts[::-1]
    after = openai.responses.input_items.list(third.id, order="asc", after=items.data[1].id or "")
    assert [_text(item) for item in after] == texts[2:]
    assert all(item.id for item in openai.responses.input_items.list(third.id))


def _text(item: Any) -> str:
    return "".join(part.text for part in item.content)


def test_an_unknown_previous_response_is_refused_in_openais_words(openai: Any) -> None:
    with pytest.raises(BadRequestError) as caught:
        _ = openai.responses.create(model="demo", input="a", previous_response_id="resp_x")
    assert caught.value.code == "previous_response_not_found"
    assert caught.value.param == "previous_response_id"
    assert "send the whole conversation as 'input'" in caught.value.message


def test_a_response_in_progress_cannot_be_continued(node: Node, openai: Any) -> None:
    node.chat.scripts["demo"] = hangs(Started((1,)))
    running = openai.responses.create(**FIELDS, input="a", background=True)
    with pytest.raises(BadRequestError, match="has not ended"):
        _ = openai.responses.create(model="demo", input="b", previous_response_id=running.id)
    openai.responses.delete(running.id)


def test_a_call_that_was_cut_is_not_continued(node: Node, openai: Any) -> None:
    cut = CallPart(name="", arguments="", ends=True, is_cut=True)
    length = Finished("length", 3, 3, 2, 1, FINISHED.stats)
    node.chat.scripts["demo"] = says(
        Started((1,)), CallPart(name="look", arguments='{"a'), cut, length
    )
    first = openai.responses.create(**FIELDS, input="one", tools=TOOLS)
    assert (first.status, first.output[-1].type) == ("incomplete", "function_call")
    _ = openai.responses.create(model="demo", input="two", previous_response_id=first.id)
    assert [message["role"] for message in node.chat.requests[-1].messages] == ["user", "user"]


def test_an_answer_in_the_background_outlives_its_client(node: Node, openai: Any) -> None:
    gate = Gate()
    node.chat.scripts["demo"] = gate.script()
    created = openai.responses.create(**FIELDS, input="hi", background=True)
    assert created.status == "queued" and created.background is True
    assert openai.responses.retrieve(created.id).status in ("queued", "in_progress")
    gate.let(4)
    final = ended(openai, created.id)
    assert (final.status, final.output_text) == ("completed", "word0 word1 word2 word3 ")
    assert final.usage.output_tokens == 3


def test_an_answer_is_cancelled_by_a_request_without_a_body_and_its_type(
    node: Node, openai: Any
) -> None:
    """OpenAI's Node client and `curl -X POST` send neither."""
    node.chat.scripts["demo"] = hangs(Started((1,)))
    running = openai.responses.create(**FIELDS, input="a", background=True)
    request = f"POST /v1/responses/{running.id}/cancel HTTP/1.1\r\nHost: localhost:{node.port}\r\n"
    with node.raw(
        f"{request}Content-Length: 0\r\nConnection: close\r\n\r\n".encode()
    ) as connection:
        reply = b"".join(iter(lambda: connection.recv(65536), b""))
    assert reply.startswith(b"HTTP/1.1 200 ")
    assert openai.responses.retrieve(running.id).status == "cancelled"


def test_a_dropped_stream_resumes_without_a_gap_or_a_repeat(node: Node, openai: Any) -> None:
    gate = Gate()
    node.chat.scripts["demo"] = gate.script()
    with openai.responses.create(**FIELDS, input="hi", background=True, stream=True) as stream:
        first: Any = next(stream)
        second = next(stream)
        assert [first.type, second.type] == ["response.created", "response.queued"]
        assert first.response.status == "queued"
        gate.let(2)
        before = [first, second]
        while "word1" not in getattr(before[-1], "delta", ""):
            before.append(next(stream))
    id = first.response.id
    last = before[-1].sequence_number
    with (
        openai.responses.retrieve(id, stream=True, starting_after=last) as one,
        openai.responses.retrieve(id, stream=True) as other,
    ):
        gate.let(2)
        rest, whole = list(one), list(other)
    past = list(openai.responses.retrieve(id, stream=True, starting_after=1))
    reply = node.ask("GET", f"/v1/responses/{id}?stream=True")  # as Python's requests writes it
    assert reply.headers["content-type"].startswith("text/event-stream")
    resumed = [event.to_dict() for event in (*before, *rest)]
    assert resumed == [event.to_dict() for event in whole]
    assert [each["sequence_number"] for each in resumed] == list(range(len(resumed)))
    assert [event.to_dict() for event in past] == resumed[2:]
    assert resumed[-1]["type"] == "response.completed"
    with openai.responses.stream(response_id=id, starting_after=last) as helper:
        assert helper.get_final_response().output_text == "word0 word1 word2 word3 "


def test_a_cancelled_answer_ends_and_keeps_what_it_said(node: Node, openai: Any) -> None:
    gate = Gate()
    gate.let(2)
    node.chat.scripts["demo"] = gate.script()
    with openai.responses.create(**FIELDS, input="hi", background=True, stream=True) as stream:
        events: list[Any] = [next(stream)]
        while "word1" not in getattr(events[-1], "delta", ""):
            events.append(next(stream))
        id = events[0].response.id
        cancelled = openai.responses.cancel(id)
        events += stream
    assert node.chat.closed.wait(60)
    assert (cancelled.status, cancelled.output_text) == ("cancelled", "word0 word1 ")
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.status == "cancelled"
    assert openai.responses.cancel(id).to_dict() == cancelled.to_dict(), "it is idempotent"
    assert openai.responses.retrieve(id).to_dict() == cancelled.to_dict()
    node.chat.scripts["demo"] = says(Started((1,)), FINISHED)
    _ = openai.responses.create(model="demo", input="on", previous_response_id=id)
    texts = [message["content"] for message in node.chat.requests[-1].messages]
    assert texts == ["hi", "word0 word1 ", "on"]


def test_only_an_answer_in_the_background_is_cancelled_or_followed(openai: Any) -> None:
    created = openai.responses.create(**FIELDS, input="hi")
    with pytest.raises(BadRequestError, match="cannot be cancelled"):
        _ = openai.responses.cancel(created.id)
    with pytest.raises(BadRequestError, match="cannot be followed"):
        _ = openai.responses.retrieve(created.id, stream=True)


def test_a_response_is_deleted_while_it_is_answered(node: Node, openai: Any) -> None:
    node.chat.scripts["demo"] = hangs(Started((1,)), TextDelta("so", (2,)))
    created = openai.responses.create(**FIELDS, input="hi", background=True)
    assert node.chat.began.wait(60)
    openai.responses.delete(created.id)
    assert node.chat.closed.wait(60)
    for call in (openai.responses.retrieve, openai.responses.cancel, openai.responses.delete):
        with pytest.raises(NotFoundError):
            _ = call(created.id)


def test_an_answer_that_is_not_in_the_background_ends_with_its_client(
    node: Node, openai: Any
) -> None:
    gate = Gate()
    gate.let(1)
    node.chat.scripts["demo"] = gate.script()
    with openai.responses.create(**FIELDS, input="hi", stream=True) as stream:
        first: Any = next(stream)
    assert node.chat.closed.wait(60)
    assert ended(openai, first.response.id).status == "cancelled"


def test_a_refused_request_is_refused_and_leaves_nothing(node: Node, openai: Any) -> None:
    for stream in (False, True):
        body = {"model": "nothing", "store": True, "input": "a", "stream": stream}
        reply = node.ask("POST", "/v1/responses", body)
        assert (reply.status, reply.error["code"]) == (404, "model_not_found")
        id = reply.headers["x-request-id"].replace("req_", "resp_")
        assert node.ask("GET", f"/v1/responses/{id}").status == 404
    created = openai.responses.create(model="nothing", store=True, input="a", background=True)
    failed = ended(openai, created.id)
    assert (failed.status, failed.error.code) == ("failed", "model_not_found")


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_breaks_off_is_stored_as_failed(
    node: Node, openai: Any, stream: bool
) -> None:
    lost = PeerLost("a node is gone")
    node.chat.scripts["demo"] = says(Started((1,)), TextDelta("so", (2,)), then=lost)
    reply = node.ask("POST", "/v1/responses", {**FIELDS, "input": "a", "stream": stream})
    assert reply.status == (200 if stream else 503)
    stored = openai.responses.retrieve(reply.headers["x-request-id"].replace("req_", "resp_"))
    assert stored.status == "failed" and stored.error is not None
    assert stored.error.message == "a node is gone"


BAD = {
    "stream=maybe": "stream",
    "starting_after=1": "starting_after",
    "stream=true&starting_after=-1": "starting_after",
    "stream=true&starting_after=x": "starting_after",
    "stream=true&starting_after=": "starting_after",
    "stream=true&starting_after=99": "starting_after",
    "stream=true&starting_after=9999999999999999": "starting_after",
    "stream=true&stream=true": "stream",
    "after=1": "after",
}


@pytest.mark.parametrize("query", BAD)
def test_a_bad_query_is_refused_by_name(node: Node, openai: Any, query: str) -> None:
    id = openai.responses.create(**FIELDS, input="hi", background=True).id
    _ = ended(openai, id)
    reply = node.ask("GET", f"/v1/responses/{id}?{query}")
    assert (reply.status, reply.error["param"]) == (400, BAD[query])


BAD_PAGES = {
    "limit=0": "limit",
    "limit=101": "limit",
    "limit=x": "limit",
    "order=up": "order",
    "after=nothing": "after",
    "before=x": "before",
}


@pytest.mark.parametrize("query", BAD_PAGES)
def test_a_bad_page_is_refused_by_name(node: Node, openai: Any, query: str) -> None:
    id = openai.responses.create(**FIELDS, input="hi").id
    reply = node.ask("GET", f"/v1/responses/{id}/input_items?{query}")
    assert (reply.status, reply.error["param"]) == (400, BAD_PAGES[query])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"background": True, "store": False}, "background"),
        ({"background": "yes"}, "background"),
        ({"previous_response_id": ""}, "previous_response_id"),
        ({"previous_response_id": 5}, "previous_response_id"),
        ({"store": "yes"}, "store"),
        ({"conversation": "c"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
    ],
    ids=str,
)
def test_a_bad_field_is_refused_by_name(node: Node, fields: Any, param: str) -> None:
    reply = node.ask("POST", "/v1/responses", {**FIELDS, "input": "a", **fields})
    assert (reply.status, reply.error["param"]) == (400, param)


def test_items_with_the_same_id_do_not_turn_pages_for_ever(openai: Any) -> None:
    same: Any = {"id": "same", "role": "user", "content": "x"}
    id = openai.responses.create(**FIELDS, input=[same, same, same]).id
    items = openai.responses.input_items.list(id, limit=1)
    assert len(list(items)) <= 3
