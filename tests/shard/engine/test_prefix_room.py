"""Kept prefixes and requests in progress share one room, which nothing exceeds, at no time.

A hit is a copy, so a conversation of up to half of the room finds all that was read of it, and a
longer one finds what has room beside it. The model's numbers depend on how many rows a forward has:
rows of another forward would show.
"""

import mlx.core as mx
import pytest
from engines import answer, request
from held_prefixes import cache_of, held_bytes, nodes, prefix_of
from prefixes import CHUNK, TOKENS, cold, engine, turn

from exo_node.shard.engine.answers.events import AnswerEnd, Delta
from exo_node.shard.engine.answers.text_engine import TextEngine
from exo_node.shard.engine.prefixes.prompt_path import PromptPath
from exo_node.shard.engine.request import Parameters

CONTEXT = 1024
PLAIN = CONTEXT * 256 + 5 * 28_200
"""Bytes, as a plan has them: a context of the one layer of attention, and something for states."""
DRAFTING = PLAIN + CONTEXT * 256 + 5 * 41_000
"""The same with the draft head and the hidden rows that it is yet to read at borders."""


def room_of(k: int) -> int:
    return DRAFTING if k else PLAIN


def tight(k: int, rooms: int = 1) -> TextEngine:
    return engine(room=rooms * room_of(k), context_length=CONTEXT)


def drive(served: TextEngine, engine_request: Parameters, room: int) -> tuple[list[int], int]:
    """The ids and the cached tokens; whenever it lets others pass, bytes are within the room."""
    ids, cached = list[int](), -1
    for event in served.generate(engine_request):
        assert held_bytes(served) <= room
        if isinstance(event, Delta):
            ids += event.round.tokens
        elif isinstance(event, AnswerEnd):
            cached = event.stats.cached_tokens
    assert served.cache_bytes() == 0
    assert held_bytes(served) <= room
    return ids, cached


def converse(rows: int, k: int, turns: int = 3) -> tuple[TextEngine, list[int], list[int]]:
    """The engine after a conversation that begins with `rows` rows, its last prompt, and the
    tokens that each turn did not read; each answer is the cold one."""
    warm, talk, ids_so_far, cached = tight(k), turn(rows, rows), list[int](), list[int]()
    for number in range(turns):
        ids_so_far = [*talk, 7, 8]
        ids, hit = drive(warm, request(ids_so_far, k, TOKENS), room_of(k))
        assert tuple(ids) == cold(ids_so_far, k)[0]
        cached.append(hit)
        talk = [*ids_so_far, *ids, *turn(12, number)]
    return warm, ids_so_far, cached


@pytest.mark.parametrize(("rows", "k"), [(330, 0), (400, 3)])
def test_a_conversation_of_less_than_half_of_the_room_reads_what_is_new(rows: int, k: int) -> None:
    warm, ids, cached = converse(rows, k)
    assert cached[0] == 0
    assert min(cached[1:]) >= rows - CHUNK
    assert_as_cold(warm, ids, k)


@pytest.mark.parametrize(
    ("rows", "k"), [(520, 0), pytest.param(640, 1, marks=pytest.mark.smoke), (800, 3)]
)
def test_a_longer_one_finds_what_has_room_beside_it(rows: int, k: int) -> None:
    _, _, cached = converse(rows, k)
    assert cached[0] == 0 < min(cached[1:]) <= max(cached) <= rows


def assert_as_cold(warm: TextEngine, prompt: list[int], k: int) -> None:
    """The cached state is, bit for bit, what reading it leaves."""
    engine_request, alone = request(prompt, k, 1), engine()
    _ = answer(alone, engine_request)
    some, others = (prefix_of(each, engine_request) for each in (warm, alone))
    assert some is not None and others is not None and some.rows == others.rows
    mine, theirs = some.arrays(), others.arrays()
    assert len(mine) == len(theirs) > 6
    assert all(mx.array_equal(a, b).item() for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("k", [0, 3])
def test_the_memory_of_mlx_keeps_the_bound(k: int) -> None:
    """Its own peak as a prefix is found."""
    room, talk = room_of(k), turn(400, 3)
    warm = tight(k)
    _ = answer(warm, request([*talk, 7], k, 1))
    mx.synchronize()
    others = mx.get_active_memory() - held_bytes(warm)
    mx.reset_peak_memory()
    prefix = prefix_of(warm, request([*talk, 7, 8], k, 3))
    assert prefix is not None and prefix.rows > 0
    assert mx.get_peak_memory() - others <= room


@pytest.mark.smoke
def test_a_prompt_that_has_no_room_beside_others_drops_nothing_of_its_own() -> None:
    """Earlier prefixes stay cached."""
    prompt = [*turn(300, 5), *turn(100, 6), 7]
    warm = tight(0)
    _ = answer(warm, request(prompt, 0, 1))
    before = warm.prefix_cache_bytes
    cache, path = cache_of(warm), PromptPath(prompt, [160, 300, 401])
    assert max(cache.cached_ends(path), default=0) == 300
    prefix = prefix_of(warm, request(prompt, 0, 1))
    assert prefix is not None
    other = [*prompt[:300], *turn(30, 7)]
    live = room_of(0) - before - 1000
    _ = cache.insert(PromptPath(other, [160, 300]), prefix, 0, live)
    assert warm.prefix_cache_bytes == before
    stranger = PromptPath(turn(300, 8), [160, 300])
    assert cache.insert(stranger, prefix, 0, room_of(0) - 1000) is None
    assert warm.prefix_cache_bytes == before
    assert max(cache.cached_ends(path), default=0) == 300


LONG = [*turn(400, 50), 7, 8]


@pytest.mark.parametrize("events", [2, 17])
def test_what_a_cancelled_request_read_stays(events: int) -> None:
    warm = tight(2)
    steps = warm.generate(request(LONG, 2, 60))
    for _ in range(events):
        _ = next(steps)
    rows = max((node.end for node in nodes(cache_of(warm))), default=0)
    steps.close()
    assert warm.cache_bytes() == 0 and held_bytes(warm) <= room_of(2)
    ids, cached = drive(warm, request(LONG, 2, TOKENS), room_of(2))
    assert tuple(ids) == cold(LONG, 2)[0]
    assert cached == rows
