"""Images in every dialect, from the official clients where there is one, over a real server."""

import base64
from typing import Any

import pytest
from fakes import says
from http_node import Node

from exo_node.placement.errors import InvalidRequest

DATA = [b"\x89PNG one", b"\xff\xd8\xff two"]
BASE64 = [base64.b64encode(each).decode() for each in DATA]
URLS = [f"data:image/png;base64,{BASE64[0]}", f"DATA:image/JPEG;Base64,{BASE64[1]}"]
IMAGE = {"type": "image"}


@pytest.fixture
def node(running: Node) -> Node:
    running.chat.reset()
    running.chat.images = "read"
    return running


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


def test_openais_client_shows_images(node: Node, openai: Any) -> None:
    parts = [
        text("a"),
        {"type": "image_url", "image_url": {"url": URLS[0], "detail": "high"}},
        {"type": "image_url", "image_url": {"url": URLS[1]}},
    ]
    _ = openai.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": parts}], max_tokens=4
    )
    (request,) = node.chat.requests
    assert request.messages[0]["content"] == [text("a"), IMAGE, IMAGE]
    assert [each.data for each in request.images] == DATA
    assert [each.media_type for each in request.images] == ["image/png", "image/jpeg"]
    fields = [f"messages[0].content[{part}].image_url.url" for part in (1, 2)]
    assert [each.field for each in request.images] == fields


def test_a_response_reads_images_of_the_user_and_of_tools(node: Node, openai: Any) -> None:
    _ = openai.responses.create(
        model="demo",
        input=[
            {
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "a"},
                    {"type": "input_image", "image_url": URLS[0], "detail": "auto"},
                ],
            },
            {"type": "function_call", "name": "view", "call_id": "c", "arguments": "{}"},
            {
                "type": "function_call_output",
                "call_id": "c",
                "output": [{"type": "input_image", "image_url": URLS[1], "detail": "auto"}],
            },
        ],
    )
    (request,) = node.chat.requests
    contents = [each["content"] for each in request.messages]
    assert (contents[0], contents[-1]) == ([text("a"), IMAGE], [IMAGE])
    assert [each.data for each in request.images] == DATA
    assert request.images[1].field == "input[2].output[0].image_url"


def test_anthropics_client_shows_images_of_the_user_and_of_tools(
    node: Node, anthropic: Any
) -> None:
    sources = [
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
        for data in BASE64
    ]
    result = {"type": "tool_result", "tool_use_id": "t", "is_error": True, "content": [sources[0]]}
    _ = anthropic.messages.create(
        model="demo",
        max_tokens=4,
        messages=[{"role": "user", "content": [text("a"), result, sources[1], text("b")]}],
    )
    (request,) = node.chat.requests
    contents = [each["content"] for each in request.messages]
    assert contents == [[text("Error: "), IMAGE], [text("a\n"), IMAGE, text("\nb")]]
    assert [each.data for each in request.images] == DATA
    assert request.images[0].field == "messages[0].content[1].content[0].source.data"


def test_a_media_type_may_be_in_capitals(node: Node) -> None:
    source = {"type": "base64", "media_type": "IMAGE/PNG", "data": BASE64[0]}
    body = chat({"type": "image", "source": source})
    reply = node.ask("POST", "/v1/messages", {"model": "demo", "max_tokens": 4, **body})
    assert reply.status == 200, reply.body


def test_ollamas_client_is_told_which_image_is_damaged(node: Node) -> None:
    """Its errors have a text and no field."""
    at, why = "messages[0].images[1]", "the image is damaged; send it again whole"
    node.chat.scripts["demo"] = says(then=InvalidRequest(why, param=at))
    message = {"role": "user", "content": "a", "images": BASE64}
    body = {"model": "demo", "stream": False, "messages": [message]}
    reply = node.ask("POST", "/api/chat", body)
    assert (reply.status, reply.json) == (400, {"error": f"'{at}': {why}"})


def test_ollamas_client_shows_images(node: Node, ollama: Any) -> None:
    _ = ollama.chat("demo", [{"role": "user", "content": "a", "images": DATA}])
    _ = ollama.generate("demo", "b", images=DATA[:1])
    chat, generate = node.chat.requests
    assert chat.messages[0]["content"] == [IMAGE, IMAGE, text("a")]
    assert generate.messages[0]["content"] == [IMAGE, text("b")]
    assert [each.data for each in chat.images] == DATA
    assert [each.field for each in (*chat.images, *generate.images)] == [
        "messages[0].images[0]",
        "messages[0].images[1]",
        "images[0]",
    ]


def test_tokens_of_images_are_counted(node: Node, anthropic: Any) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": BASE64[0]}
    image = {"type": "image", "source": source}
    _ = anthropic.messages.count_tokens(
        model="demo", messages=[{"role": "user", "content": [image]}]
    )
    assert [each.data for each in node.chat.requests[0].images] == DATA[:1]


def chat(part: object) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [part]}]}


def url(value: object) -> dict[str, Any]:
    return chat({"type": "image_url", "image_url": {"url": value}})


AT = "messages[0].content[0].image_url"
BAD: list[tuple[str, dict[str, Any], str, str]] = [
    ("/v1/chat/completions", url("cat.png"), f"{AT}.url", "begins with data:image"),
    ("/v1/chat/completions", url("file:///etc/passwd"), f"{AT}.url", "begins with data:image"),
    ("/v1/chat/completions", url(""), f"{AT}.url", "data URL"),
    ("/v1/chat/completions", url(None), f"{AT}.url", "data URL"),
    ("/v1/chat/completions", url("data:image/png,abc"), f"{AT}.url", "begins with data:image"),
    ("/v1/chat/completions", url("data:image/png;base64,@@@"), f"{AT}.url", "no valid base64"),
    ("/v1/chat/completions", url("data:image/png;base64"), f"{AT}.url", "begins with data:image"),
    ("/v1/chat/completions", url("data:image/png;base64,iVBOR"), f"{AT}.url", "no valid base64"),
    ("/v1/chat/completions", url("data:image/png;base64,"), f"{AT}.url", "is empty"),
    ("/v1/chat/completions", url("data:text/html;base64,YQ=="), f"{AT}.url", "of type text/html"),
    ("/v1/chat/completions", chat({"type": "image_url"}), AT, "data URL of an image"),
    (
        "/v1/messages",
        chat({"type": "image", "source": {"type": "file", "file_id": "f"}}),
        "messages[0].content[0].source",
        "'base64' with 'data'",
    ),
    (
        "/v1/messages",
        chat({"type": "image"}),
        "messages[0].content[0].source",
        "'base64' with 'data'",
    ),
    (
        "/v1/responses",
        {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
        "input[0].content[0].image_url",
        "data URL",
    ),
    (
        "/api/chat",
        {"messages": [{"role": "user", "content": "a", "images": ["%"]}]},
        "messages[0].images[0]",
        "no valid base64",
    ),
    ("/api/generate", {"prompt": "a", "images": [BASE64[0]], "raw": True}, "images", "raw prompt"),
]


@pytest.mark.parametrize(("path", "body", "param", "words"), BAD)
def test_what_is_no_image_is_refused_by_its_field(
    node: Node, path: str, body: dict[str, Any], param: str, words: str
) -> None:
    reply = node.ask("POST", path, {"model": "demo", "max_tokens": 4, **body})
    assert reply.status == 400, reply.body
    error = reply.json["error"]
    message = error if path.startswith("/api/") else error["message"]
    assert f"'{param}'" in message and words in message, message
    assert node.chat.requests == []


def test_an_image_may_be_larger_than_eight_megabytes_and_not_than_twenty(node: Node) -> None:
    for size, status in ((9_000_000, 200), (20_100_000, 400)):
        data = base64.b64encode(bytes(size)).decode()
        body = url(f"data:image/png;base64,{data}")
        reply = node.ask("POST", "/v1/chat/completions", {"model": "demo", **body})
        assert reply.status == status, reply.body[:300]
    assert "longer than 20 MB" in reply.json["error"]["message"]
