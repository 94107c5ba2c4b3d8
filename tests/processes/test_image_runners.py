"""Real runners that read images: from files in a request to an answer."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from image_files import saved, scene
from pictures import DENSE, GEMMA, LAYERS, MISTRAL, Conversation, conversations
from runners import Placement, WireAnswer, running

from exo_node.placement.errors import ContextLengthExceeded, InvalidRequest
from exo_node.proto import peer_pb2 as pb

FIELDS: dict[str, Any] = {
    "folder": DENSE,
    "native_mtp": True,
    "context_length": 1024,
    "prefix_cache_bytes": 64 << 20,
    "prefill_chunk": 64,
}


@pytest.fixture(scope="module")
async def one() -> AsyncIterator[Placement]:
    async with running((0, LAYERS), **FIELDS) as placement:
        yield placement


def fields_of(it: Conversation, **changes: Any) -> dict[str, Any]:
    images = [pb.Image(data=file, field=f"messages[{n}]") for n, file in enumerate(it.files)]
    fields: dict[str, Any] = {"images": images, "max_tokens": len(it.greedy_ids)}
    if "token_ids" not in changes:
        fields["messages"] = pb.Messages(json=json.dumps(it.messages))
    return fields | changes


async def ask(placement: Placement, **fields: Any) -> WireAnswer:
    return await placement.answer("", **fields)


async def test_an_attempt_after_a_loss_has_ids_and_images(one: Placement) -> None:
    it = conversations()[1]
    first = await ask(one, **fields_of(it))
    ids = pb.TokenIds(ids=first.prompt_ids)
    rest = await ask(one, **fields_of(it, token_ids=ids, replay=first.rounds[:5], attempt=2))
    assert [*(t for r in first.rounds[:5] for t in r.tokens), *rest.ids] == it.greedy_ids
    with pytest.raises(InvalidRequest) as refused:
        _ = await ask(one, **fields_of(it, token_ids=ids, images=fields_of(it)["images"][:1]))
    assert refused.value.param == "images"


async def test_rows_of_images_are_counted(one: Placement) -> None:
    it = conversations()[3]
    request = pb.EncodeRequest(messages=fields_of(it)["messages"], images=fields_of(it)["images"])
    reply = await one.client.encode(one.endpoints[0], request)
    assert len(reply.ids) == len(it.prompt_ids)


async def test_an_image_that_is_none_is_refused_by_its_field(one: Placement) -> None:
    it = conversations()[0]
    broken = [pb.Image(data=it.files[0][:400], field="messages[0].content[1].image_url")]
    with pytest.raises(InvalidRequest, match="damaged or truncated") as refused:
        _ = await ask(one, **fields_of(it, images=broken))
    assert refused.value.param == "messages[0].content[1].image_url"
    with pytest.raises(InvalidRequest, match="places for 1 of 2 images"):
        _ = await ask(one, **fields_of(it, images=[*fields_of(it)["images"]] * 2))
    many = fields_of(conversations()[3])
    with pytest.raises(ContextLengthExceeded):
        messages = conversations()[3].messages * 5
        chat = pb.Messages(json=json.dumps(messages))
        _ = await ask(one, **many | {"messages": chat, "images": many["images"] * 5})


async def test_images_beyond_the_context_are_not_decoded(one: Placement) -> None:
    """Each takes time, and memory until the prompt is refused."""
    size = 256  # 64 rows
    files = [saved(scene(size=(size, size)))] * 20
    images = [pb.Image(data=file, field=f"messages[{n}]") for n, file in enumerate(files)]
    images.append(pb.Image(data=b"no image", field="messages[20]"))
    with pytest.raises(ContextLengthExceeded, match="1088 tokens > 1024 maximum") as refused:
        _ = await ask(one, **fields_of(conversations()[0], images=images))
    assert refused.value.param == "messages[16]"
    request = pb.EncodeRequest(messages=fields_of(conversations()[0])["messages"], images=images)
    with pytest.raises(ContextLengthExceeded):
        _ = await one.client.encode(one.endpoints[0], request)


@pytest.mark.parametrize("folder", [GEMMA, MISTRAL], ids=lambda folder: folder.name)
async def test_other_families_answer_alike(folder: Path) -> None:
    """The helper puts into a prompt what stands around rows, and chunks are shorter than images."""
    fields: dict[str, Any] = FIELDS | {"folder": folder, "native_mtp": False, "prefill_chunk": 8}
    for bounds in ((0, LAYERS), (0, 2, LAYERS)):
        async with running(bounds, **fields) as placement:
            for it in conversations(folder):
                assert (await ask(placement, **fields_of(it))).ids == it.greedy_ids
