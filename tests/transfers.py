"""States of prompts that one engine hands to another, as runners send and read them."""

from dataclasses import replace

from engines import Answer, answer
from prefixes import ROOM

from exo_node.shard.checkpoint.prefix_files import PrefixReceiver, ReceivedPrefix
from exo_node.shard.engine.answers.text_engine import TextEngine
from exo_node.shard.engine.request import Parameters

KEY = "the same model"
CONTEXT = 4096


def content(source: TextEngine, engine_request: Parameters, key: str = KEY) -> bytes:
    """The file that a runner sends for a request."""
    pieces = source.prefix_lookup.export(
        key, engine_request.prompt, engine_request.sharing.cache_salt, drafts=engine_request.k > 0
    )
    assert pieces is not None
    return b"".join(pieces())


def received(target: TextEngine, engine_request: Parameters, data: bytes) -> ReceivedPrefix:
    """What a runner makes of it. Raises ValueError or a parser's error."""
    expected = target.prefix_lookup.expected(
        KEY,
        engine_request.prompt,
        engine_request.sharing.cache_salt,
        drafts=engine_request.k > 0,
        context_length=CONTEXT,
    )
    receiver = PrefixReceiver(ROOM, expected.check)
    for begin in range(0, len(data), 10_007):
        receiver.feed(data[begin : begin + 10_007])
    return receiver.finish()


def handed_over(source: TextEngine, target: TextEngine, engine_request: Parameters) -> Answer:
    data = content(source, engine_request)
    state = received(target, engine_request, data)
    assert state.size == len(data)
    got = answer(target, replace(engine_request, received=state))
    assert state.held_bytes == 0
    return got
