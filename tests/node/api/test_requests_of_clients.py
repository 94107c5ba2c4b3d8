"""Requests of real clients beyond plain text, over a real server and a scripted chat."""

from typing import Any

import pytest
from fakes import FINISHED, says
from http_node import ASK, Node

from exo_node.node.chat.requests import AnswerProgress, Started, TextDelta

FUNCTION: dict[str, Any] = {"name": "weather", "parameters": {"type": "object", "properties": {}}}
PIXEL = "iVBORw0KGgo="


@pytest.fixture
def node(running: Node) -> Node:
    running.chat.reset()
    started = (Started((7, 8, 9)), AnswerProgress("prefill 2/3"))
    running.chat.scripts["demo"] = says(*started, TextDelta("a", (1,)), FINISHED)
    return running


def ignored(reply: Any) -> list[str]:
    return reply.headers["x-exo-node-ignored"].split(", ")


def chat_parts(*parts: object) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}]}


def item(*parts: object) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": list(parts)}]}


TEXT = {"type": "text", "text": "What is this?"}
DATA_URL = f"data:image/png;base64,{PIXEL}"
SOURCE = {"type": "base64", "media_type": "image/png", "data": PIXEL}
SHOWN: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/messages", chat_parts(TEXT, {"type": "image", "source": SOURCE}), "see pictures"),
    ("/v1/messages", chat_parts({"type": "document", "source": SOURCE}), "read files"),
    (
        "/v1/messages",
        {"messages": ASK, "system": [{"type": "image", "source": SOURCE}]},
        "see pictures",
    ),
    ("/v1/messages/count_tokens", chat_parts({"type": "image", "source": SOURCE}), "see pictures"),
    ("/v1/responses", item({"type": "input_image", "image_url": DATA_URL}), "see pictures"),
    ("/v1/responses", item({"type": "input_file", "file_id": "f"}), "read files"),
    (
        "/v1/chat/completions",
        chat_parts(TEXT, {"type": "image_url", "image_url": {"url": DATA_URL}}),
        "see pictures",
    ),
    ("/v1/chat/completions", chat_parts({"type": "input_audio", "input_audio": {}}), "hear sound"),
    ("/api/chat", {"messages": [{**ASK[0], "images": [PIXEL]}]}, "see pictures"),
    ("/api/generate", {"prompt": "hi", "images": [PIXEL]}, "see pictures"),
]


@pytest.mark.parametrize(("path", "body", "why"), SHOWN)
def test_what_a_user_shows_is_refused_where_the_model_cannot_see_it(
    node: Node, path: str, body: dict[str, Any], why: str
) -> None:
    """A note in its place let the model answer as if it had looked."""
    reply = node.ask("POST", path, {"model": "demo", "stream": False, **body})
    assert reply.status == 400, reply.body
    error = reply.json["error"]
    message = error if path.startswith("/api/") else error["message"]
    assert f"asks the model to {why}, which it cannot" in message
    assert node.chat.requests == []


EARLIER: list[tuple[str, dict[str, Any]]] = [
    (
        "/v1/messages",
        {"messages": [{"role": "user", "content": [{"type": "image", "source": SOURCE}]}, *ASK]},
    ),
    (
        "/v1/responses",
        {
            "input": [
                {"role": "user", "content": [{"type": "input_image", "image_url": DATA_URL}]},
                *ASK,
            ]
        },
    ),
    ("/api/chat", {"messages": [{**ASK[0], "images": [PIXEL]}, *ASK], "stream": False}),
    (
        "/v1/chat/completions",
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "image_url", "image_url": {"url": DATA_URL}}],
                },
                *ASK,
            ]
        },
    ),
]


@pytest.mark.parametrize(("path", "body"), EARLIER)
def test_a_conversation_continues_after_a_picture_that_was_refused(
    node: Node, path: str, body: dict[str, Any]
) -> None:
    """Codex sends the turn that was refused again, so each turn that followed was refused."""
    reply = node.ask("POST", path, {"model": "demo", **body})
    assert reply.status == 200, reply.body
    assert "image" in ignored(reply)[-1]
    first, last = node.chat.requests[-1].messages
    assert "an image was here" in first["content"]
    assert last["content"] == "hi"


def test_a_picture_after_a_tools_result_is_the_users_own(node: Node) -> None:
    result = {"type": "tool_result", "tool_use_id": "t", "content": "done"}
    image = {"type": "image", "source": SOURCE}
    reply = node.ask("POST", "/v1/messages", {"model": "demo", **chat_parts(result, image)})
    assert reply.status == 400
    turns = [chat_parts(each)["messages"][0] for each in (image, result)]
    reply = node.ask("POST", "/v1/messages", {"model": "demo", "messages": turns})
    assert reply.status == 400, "what only a tool says is no later turn of the user's"


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [("image", "could not process image"), ("document", "does not support pdf input")],
)
def test_claude_code_hears_of_a_picture_in_anthropics_words(
    node: Node, kind: str, sentence: str
) -> None:
    """After them it removes the picture and continues; after others it repeats it in every turn."""
    block = {"type": kind, "source": SOURCE}
    reply = node.ask("POST", "/v1/messages", {"model": "demo", **chat_parts(TEXT, block)})
    assert sentence in reply.json["error"]["message"].lower()


def test_a_picture_that_a_tool_gave_is_a_note_and_named(node: Node) -> None:
    image = {"type": "image", "source": SOURCE}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [image]}
    reply = node.ask("POST", "/v1/messages", {"model": "demo", **chat_parts(result)})
    assert (reply.status, ignored(reply)[-1]) == (200, "messages[].content (an image)")
    output = [{"type": "input_image", "image_url": DATA_URL}]
    call = {"type": "function_call", "name": "f", "call_id": "c", "arguments": "{}"}
    output_item = {"type": "function_call_output", "call_id": "c", "output": output}
    reply = node.ask("POST", "/v1/responses", {"model": "demo", "input": [call, output_item]})
    assert (reply.status, ignored(reply)[-1]) == (200, "messages[].content (an image)")
    turn = {"role": "tool", "content": "done", "images": [PIXEL], "tool_name": "f"}
    reply = node.ask("POST", "/api/chat", {"model": "demo", "messages": [*ASK, turn]})
    assert (reply.status, ignored(reply)) == (200, ["messages[].content (an image)"])
    assert all("an image was here" in each.messages[-1]["content"] for each in node.chat.requests)


def test_a_call_that_a_request_insists_on_goes_before_the_form_of_its_text(
    node: Node, openai: Any
) -> None:
    """OpenAI allows both, and instructor's RESPONSES_TOOLS always sends both."""
    schema: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "string"}}}
    text: Any = {"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}}
    tool: Any = {"type": "function", **FUNCTION, "strict": False}
    named: Any = {"type": "function", "name": "weather"}
    reply = openai.responses.with_raw_response.create(
        model="demo", input="hi", tools=[tool], tool_choice=named, text=text
    )
    assert ignored(reply) == ["text.format (tool_choice insists on a call)"]
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    body = {"messages": ASK, "tools": [{"type": "function", "function": FUNCTION}]}
    body |= {"tool_choice": "required", "response_format": form}
    reply = node.ask("POST", "/v1/chat/completions", {"model": "demo", **body})
    assert ignored(reply) == ["response_format (tool_choice insists on a call)"]
    own = [{"name": "weather", "input_schema": FUNCTION["parameters"]}]
    config = {"format": {"type": "json_schema", "schema": schema}}
    body = {"messages": ASK, "tools": own, "tool_choice": {"type": "any"}, "output_config": config}
    reply = node.ask("POST", "/v1/messages", {"model": "demo", **body})
    assert ignored(reply) == ["output_config.format (tool_choice insists on a call)"]
    assert [each.output.grammar.kind for each in node.chat.requests] == ["calls"] * 3


def test_claude_codes_line_about_billing_is_no_part_of_the_prompt(node: Node) -> None:
    """It ends in a hash of the conversation, so no other conversation would find its prefix."""
    prompts: list[Any] = []
    for cch in ("1c0", "9f3"):
        line = f"x-anthropic-billing-header: cc_version=2.1.197.{cch}; cc_entrypoint=cli;"
        system = [{"type": "text", "text": text} for text in (line, "You are an agent.")]
        body = {"model": "demo", "max_tokens": 5, "messages": ASK, "system": system}
        reply = node.ask("POST", "/v1/messages", body)
        assert ignored(reply) == ["system[0] (a line about billing)"]
        prompts.append(node.chat.requests[-1].messages)
    assert prompts[0] == prompts[1]
    assert prompts[0][0] == {"role": "system", "content": "You are an agent."}
    body["system"] = [{"type": "text", "text": f"Say {line}"}]
    assert node.ask("POST", "/v1/messages", body).status == 200
    assert node.chat.requests[-1].messages[0]["content"] == f"Say {line}"


def test_a_stream_of_messages_counts_its_prompt_once(anthropic: Any) -> None:
    fields: dict[str, Any] = {"model": "demo", "max_tokens": 5, "messages": ASK}
    counts = ("input_tokens", "cache_read_input_tokens", "output_tokens")
    with anthropic.messages.stream(**fields) as stream:
        usages = [
            event.message.usage if event.type == "message_start" else event.usage
            for event in stream
            if event.type in ("message_start", "message_delta")
        ]
        final = stream.get_final_message().usage
    assert len(usages) == 2
    sums = [sum(getattr(usage, name) for usage in usages) for name in counts]
    assert sums == [1, 2, 3] == [getattr(final, name) for name in counts]


def test_usage_of_a_response_has_every_count_that_openais_types_require(openai: Any) -> None:
    response = openai.responses.create(model="demo", input="hi")
    assert response.usage is not None
    details = response.usage.input_tokens_details
    _ = details.__class__.model_validate_json(details.model_dump_json())
    assert (details.cached_tokens, details.cache_write_tokens) == (2, 0)


def test_anthropics_client_lists_the_models(openai: Any, anthropic: Any) -> None:
    page = anthropic.models.list()
    assert (page.has_more, page.first_id, page.last_id) == (False, "demo", "owner/large-model")
    models: list[Any] = list(page)
    for model in models:
        assert (model.type, model.display_name) == ("model", model.id)
        assert model.created_at.isoformat() == "1970-01-01T00:00:01+00:00"
        _ = model.__class__.model_validate_json(model.model_dump_json())
        assert anthropic.models.retrieve(model.id) == model
    assert [each.id for each in openai.models.list()] == [each.id for each in models]


def test_anthropics_client_hears_of_an_unknown_model_in_its_own_words(
    node: Node, anthropic: Any
) -> None:
    package = pytest.importorskip("anthropic")
    with pytest.raises(package.NotFoundError) as caught:
        _ = anthropic.models.retrieve("nope")
    body: Any = caught.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "not_found_error")
    plain = node.ask("GET", "/v1/models/nope").error
    assert (plain["type"], plain["message"]) == ("invalid_request_error", body["error"]["message"])
    foreign = node.ask("GET", "/v1/models", headers={"anthropic-version": "x", "Host": "evil"})
    assert (foreign.status, foreign.json["type"]) == (421, "error"), "the guard knows it too"
