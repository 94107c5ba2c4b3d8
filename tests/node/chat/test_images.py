"""Contents of text and images, and what a model gets that reads no images."""

from collections.abc import Mapping

import pytest

from exo_node.mtp.types import Sampling
from exo_node.node.chat.images import MAX_IMAGES, READ, as_read, content_of, gathered
from exo_node.node.chat.requests import GenerationRequest, Image
from exo_node.placement.errors import InvalidRequest, UnsupportedParameter
from exo_node.placement.ids import ModelId, RequestId

ONE, TWO = Image(b"1", "image/png", "[1].url"), Image(b"2", "image/png", "input[7].image_url")


def request_of(*messages: Mapping[str, object]) -> GenerationRequest:
    texts, images = gathered(messages)
    fields = RequestId("r"), ModelId("m"), texts, Sampling()
    return GenerationRequest(*fields, images=images)


def test_texts_alone_are_one_text() -> None:
    assert content_of(["a", "b"]) == "ab"
    assert content_of(["a", "b"], "\n") == "a\nb"
    assert content_of([]) == ""


def test_images_stand_between_texts_in_their_order() -> None:
    request = request_of(
        {"role": "user", "content": content_of(["a", ONE, TWO, "b", "c"], "\n")},
        {"role": "assistant", "content": "d"},
        {"role": "user", "content": content_of([ONE])},
    )
    first, answer, last = request.messages
    image = {"type": "image"}
    assert first["content"] == [
        {"type": "text", "text": "a\n"},
        image,
        {"type": "text", "text": "\n"},
        image,
        {"type": "text", "text": "\nb\nc"},
    ]
    assert (answer["content"], last["content"]) == ("d", [image])
    assert [each.data for each in request.images] == [b"1", b"2", b"1"]
    fields = [each.field for each in request.images]
    assert fields == ["messages[0].content[1].url", TWO.field, "messages[2].content[1].url"]
    assert [each.must_be_seen for each in request.images] == [False, False, True]
    assert as_read(request, READ) == (request, ())


def test_a_model_that_reads_no_images_gets_notes_for_earlier_ones() -> None:
    request = request_of(
        {"role": "user", "content": content_of(["look:", ONE], "\n")},
        {"role": "tool", "content": content_of([TWO])},
        {"role": "user", "content": "and?"},
    )
    read, notes = as_read(request, "no tower")
    note = "[an image was here; this node reads text only]"
    assert [each["content"] for each in read.messages] == [f"look:\n{note}", note, "and?"]
    assert (read.images, notes) == ((), ("messages[].content (an image)",))


@pytest.mark.parametrize("role", ["user", "system"])
def test_what_it_must_see_is_refused_with_the_reason(role: str) -> None:
    turn: dict[str, object] = {"role": role, "content": content_of([ONE])}
    for messages in ([turn], [turn, {"role": "tool", "content": "x"}]):
        with pytest.raises(UnsupportedParameter) as caught:
            _ = as_read(request_of(*messages), "exo-node[vision] is not installed")
        assert caught.value.param == "messages[0].content[1].url"
        assert "which it cannot: exo-node[vision] is not installed" in caught.value.message


def test_an_address_is_refused_where_the_model_would_read_it_and_a_note_elsewhere() -> None:
    address = Image(b"", "", "[1].url", url="http://127.0.0.1:1/secret.png")
    request = request_of(
        {"role": "tool", "content": content_of([address])}, {"role": "user", "content": "and?"}
    )
    assert as_read(request, "no tower")[0].images == ()
    with pytest.raises(UnsupportedParameter, match="send a data URL") as caught:
        _ = as_read(request, READ)
    assert caught.value.param == "messages[0].content[1].url"
    assert "secret" not in caught.value.message


def test_images_are_counted() -> None:
    with pytest.raises(InvalidRequest, match=f"more than {MAX_IMAGES}") as caught:
        _ = gathered([{"role": "user", "content": content_of([ONE] * (MAX_IMAGES + 1))}])
    assert caught.value.param == "messages[0].content[1].url"
