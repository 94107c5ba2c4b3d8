"""A prompt that readers help to read: every cache, probability and id of reading alone."""

# pyright: reportPrivateUsage=false

import hashlib
import json
import math
import random
import struct
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from engines import answer, engine_of, load_quietly, request, spec
from held_prefixes import cache_of
from pictures import DEEP, DENSE, conversations, picture_engine, picture_request, picture_spec
from pictures import loaded as loaded_pictures
from prefixes import (
    CHUNK,
    KINDS,
    ROOM,
    SHORT,
    TOKENS,
    comparable,
    hybrid,
    of_class,
    probabilities,
    turn,
    words,
)
from prefixes import engine as hybrid_engine
from reading_together import Drive, LocalReaders, state_behind_prompt
from small import LAYERS, small_checkpoint, small_spec
from zoo import VOCABULARY, tiny_config

from exo_node.mtp.targets import FamilyTarget
from exo_node.placement.config import hidden_size
from exo_node.placement.errors import InvalidFrame, LoadFailed, PeerLost
from exo_node.shard.checkpoint import prefix_files
from exo_node.shard.engine.answers.text_engine import TextEngine
from exo_node.shard.engine.layer_engine import LayerEngine
from exo_node.shard.engine.options import EngineOptions
from exo_node.shard.engine.prefill_forward import PrefillForward
from exo_node.shard.engine.prefixes.encoding import DeviceBytes
from exo_node.shard.engine.prompt_readings import PromptReadings
from exo_node.shard.engine.reading.link import LayerRange
from exo_node.shard.engine.reading.shared_reading import AHEAD, SharedReading
from exo_node.shard.engine.reading.views import LayerViews
from exo_node.shard.engine.request import Parameters
from exo_node.shard.model.stage_limits import StageLimits
from exo_node.shard.model.stage_model import StageModel
from exo_node.shard.model.tensors import to_bytes

PROMPT = [*turn(300, 1), *words(CHUNK * 4 + 7, 2)]
UPPER = (LayerRange(2, 4),)
CHAIN = (LayerRange(1, 2), LayerRange(2, 4))


def asked(k: int = 0, prompt: list[int] = PROMPT, **changes: Any) -> Parameters:
    return request(prompt, k, TOKENS, **({"top_logprobs": 0} | changes))


def hybrid_readers(
    layers: tuple[LayerRange, ...] = UPPER, change: Any = None, engine: TextEngine | None = None
) -> LocalReaders:
    engines = [engine or hybrid_engine() for _ in layers]
    changes = () if change is None else (change,)
    return LocalReaders(engines, layers, hybrid().expected, *changes)


def require_as_alone(
    alone: TextEngine, mine: TextEngine, readers: LocalReaders, asks: Callable[[], Parameters]
) -> None:
    assert state_behind_prompt(mine, asks(), readers) == state_behind_prompt(alone, asks())
    assert readers.outcome.reason == "" and readers.outcome.bytes > 0
    assert readers.is_closed


@pytest.mark.parametrize("layers", [UPPER, CHAIN], ids=["one", "two"])
@pytest.mark.parametrize("k", [0, pytest.param(1, marks=pytest.mark.smoke), 2, 3])
def test_every_state_is_as_if_it_had_been_read_alone(k: int, layers: Any) -> None:
    require_as_alone(hybrid_engine(), hybrid_engine(), hybrid_readers(layers), lambda: asked(k))


@pytest.mark.parametrize("kind", KINDS)
def test_in_every_kind_of_cache(kind: str) -> None:
    """Full attention, windows, recurrent states without tapes, latents."""
    engines = [of_class(kind, ROOM) for _ in range(3)]
    readers, asks = kind_readers(kind, engines[0]), kind_request(kind)
    require_as_alone(engines[1], engines[2], readers, asks)


def kind_readers(kind: str, *engines: TextEngine, **parts: Any) -> LocalReaders:
    shares, layers = len(engines) + 1, engines[0].num_layers
    borders = [layers * number // shares for number in range(1, shares + 1)]
    limits = StageLimits("p", 1, "float32", hidden_size(tiny_config(kind)), SHORT, 4096, VOCABULARY)
    return LocalReaders(engines, [LayerRange(*pair) for pair in pairwise(borders)], limits, **parts)


def kind_request(kind: str) -> Callable[[], Parameters]:
    draw = random.Random(kind)
    prompt = [draw.randrange(3, VOCABULARY) for _ in range(SHORT * 5 + 3)]
    return lambda: asked(prompt=prompt)


@pytest.mark.parametrize("bits", [4, 8])
def test_over_quantised_caches(bits: int) -> None:
    stage_spec = spec(small_checkpoint(hidden=128), 0, LAYERS, num_layers=LAYERS, native_mtp=True)
    stage_spec.kv_bits, stage_spec.kv_group_size = bits, 32
    loaded = load_quietly(stage_spec)
    engines = [engine_of(loaded, stage_spec) for _ in range(3)]
    readers = LocalReaders([engines[0]], UPPER, replace(loaded.expected, stage=1))
    prompt = words(256 * 4 + 9, 5)
    require_as_alone(engines[1], engines[2], readers, lambda: asked(2, prompt))


@pytest.mark.parametrize("k", [0, 2])
def test_behind_a_cached_prefix(k: int) -> None:
    longer = [*PROMPT, *words(CHUNK * 4, 3)]
    alone, mine, readers = hybrid_engine(), hybrid_engine(), hybrid_readers()
    for engine in (alone, mine):
        _ = answer(engine, asked(k))
    before = mine.prefix_hits["memory"]
    require_as_alone(alone, mine, readers, lambda: asked(k, longer))
    assert mine.prefix_hits["memory"] > before


@pytest.mark.parametrize("k", [0, 1])
def test_prefixes_are_cached_as_if_it_had_been_read_alone(k: int) -> None:
    alone, mine, readers = hybrid_engine(), hybrid_engine(), hybrid_readers()
    _ = answer(alone, asked(k))
    _ = Drive(mine, asked(k), readers).finish()
    longer = [*PROMPT, *words(CHUNK * 2, 3)]
    ends = [
        cache_of(engine).cached_ends(mine.prefix_lookup._path(longer, b"", drafts=k > 0))
        for engine in (alone, mine)
    ]
    assert ends[0] == ends[1] and len(ends[0]) > 1
    got, expected = (answer(engine, asked(k, longer)) for engine in (mine, alone))
    assert probabilities(got) == probabilities(expected)
    assert got.stats.cached_tokens == expected.stats.cached_tokens > 0


@pytest.mark.parametrize(("folder", "k"), [(DENSE, 0), (DENSE, 2), (DEEP, 0)])
def test_with_images(folder: Any, k: int) -> None:
    it = conversations(folder)[0]
    engines = [picture_engine(folder, prefill_chunk=16) for _ in range(3)]
    limits = replace(loaded_pictures(folder).expected, stage=1)
    last = picture_spec(folder).end_layer
    readers = LocalReaders([engines[0]], [LayerRange(last - 1, last)], limits)
    expected = state_behind_prompt(engines[1], picture_request(it, k, folder))
    assert state_behind_prompt(engines[2], picture_request(it, k, folder), readers) == expected
    assert readers.outcome.reason == "" and readers.outcome.bytes > 0


def test_layers_that_need_the_images_are_read_here() -> None:
    it = conversations(DEEP)[0]
    mine, limits = picture_engine(DEEP, prefill_chunk=16), loaded_pictures(DEEP).expected
    readers = LocalReaders([picture_engine(DEEP, prefill_chunk=16)], [LayerRange(1, 4)], limits)
    got = Drive(mine, picture_request(it, 0, DEEP), readers).finish()
    assert list(got.ids) == it.greedy_ids and "need the images" in readers.outcome.reason


def test_a_short_rest_is_read_alone() -> None:
    prompt, readers = words(CHUNK * 2, 4), hybrid_readers()
    got = Drive(hybrid_engine(), asked(0, prompt), readers).finish()
    assert probabilities(got) == probabilities(answer(hybrid_engine(), asked(0, prompt)))
    assert "2 forwards over the rest of it are too few" in got.stats.read_reason
    assert (got.stats.read_by, readers.outcome.bytes) == ((), 0)


@pytest.mark.parametrize("k", [0, 2])
def test_a_short_prompt_costs_the_same_work_with_readers_and_without(
    k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same forwards; nothing is sent, and no layers are cut or checked."""
    work = Counter[str]()

    def counted(owner: type, name: str) -> None:
        method = getattr(owner, name)

        def count(*args: Any, **parts: Any) -> Any:
            work[f"{owner.__name__}.{name}"] += 1
            return method(*args, **parts)

        monkeypatch.setattr(owner, name, count)

    for owner, name in (
        (PrefillForward, "__init__"), (SharedReading, "__init__"), (LocalReaders, "open"),
        (LocalReaders, "send"), (LayerViews, "_part"), (FamilyTarget, "forward"),
        (StageModel, "hidden"), (PromptReadings, "send"),
    ):  # fmt: skip
        counted(owner, name)
    prompt, both = words(CHUNK * 2, 4), list[Counter[str]]()
    for readers in (None, hybrid_readers()):
        engine = hybrid_engine()
        work.clear()
        _ = Drive(engine, asked(k, prompt), readers).finish()
        both.append(Counter(work))
    assert both[0] == both[1] and both[0]["PrefillForward.__init__"] == 2
    work.clear()
    _ = Drive(hybrid_engine(), asked(k), hybrid_readers()).finish()
    assert work["LocalReaders.send"] and work["PromptReadings.send"], "a long one has readers"


@pytest.mark.parametrize("refuses", ["nobody", "mine", "reader"])
def test_each_runner_checks_the_layers_that_it_computes_and_no_others(refuses: str) -> None:
    """A check takes as long as some forwards, and a reader makes its own meanwhile."""
    checks: dict[str, list[tuple[int, int]]] = {"mine": [], "reader": []}

    def checked_engine(name: str) -> TextEngine:
        def require(first: int, end: int) -> None:
            checks[name].append((first, end))
            if name == refuses:
                raise LoadFailed("these layers are no stage")

        return hybrid_engine(replace(hybrid(), require_splittable=require))

    mine, reader = checked_engine("mine"), checked_engine("reader")
    for seed in (1, 2):
        readers = hybrid_readers(engine=reader)
        prompt = words(CHUNK * 5, 10 + seed)
        got = Drive(mine, asked(0, prompt), readers).finish()
        assert probabilities(got) == probabilities(answer(hybrid_engine(), asked(0, prompt)))
        alone = "" if refuses == "nobody" else "read alone: these layers are no stage"
        assert readers.outcome.reason == alone
    if refuses == "nobody":
        assert checks == {"mine": [(0, 2)], "reader": [(2, 4)]}, "once each"


# ------------------------------------------------------------------------------------- faults


@pytest.mark.parametrize("k", [0, 2])
@pytest.mark.parametrize("lost_at", range(6))
def test_a_reader_that_is_lost_costs_what_it_had_not_returned(lost_at: int, k: int) -> None:
    change = _lost_after(lost_at)
    alone, mine, readers = hybrid_engine(), hybrid_engine(), hybrid_readers(change=change)
    got = state_behind_prompt(mine, asked(k), readers)
    assert got == state_behind_prompt(alone, asked(k))
    assert "alone: the reader is gone" in readers.outcome.reason and readers.is_closed
    longer = [*PROMPT, *words(CHUNK * 2, 3)]
    again, expected = (answer(engine, asked(k, longer)) for engine in (mine, alone))
    assert probabilities(again) == probabilities(expected)


@pytest.mark.parametrize("lost_at", [0, 1, 2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_in_every_kind_of_cache_the_rest_is_read_alone(kind: str, lost_at: int) -> None:
    """The lower layers are ahead of what came back, and have to return to it."""
    engines = [of_class(kind, ROOM) for _ in range(3)]
    readers = kind_readers(kind, engines[0], change=_lost_after(lost_at))
    asks = kind_request(kind)
    got = state_behind_prompt(engines[2], asks(), readers)
    assert got == state_behind_prompt(engines[1], asks())
    assert "alone: the reader is gone" in readers.outcome.reason


@pytest.mark.parametrize("lost_at", [1, 5, 9, 14])
def test_what_the_head_has_read_since_the_last_whole_state_is_forgotten(lost_at: int) -> None:
    """With chunks so short that few of them end with a state that is worth its room."""
    loaded = hybrid()
    stage_spec = small_spec(native_mtp=True, prefill_chunk=24, prefix_cache_bytes=ROOM)
    engines = [engine_of(loaded, stage_spec) for _ in range(3)]
    readers = LocalReaders([engines[0]], UPPER, loaded.expected, _lost_after(lost_at))
    prompt = words(24 * 17, 6)
    got = state_behind_prompt(engines[1], asked(2, prompt), readers)
    assert got == state_behind_prompt(engines[2], asked(2, prompt))
    assert "alone: the reader is gone" in readers.outcome.reason


def test_few_forwards_are_under_way_however_slow_a_reader_is() -> None:
    drive = Drive(hybrid_engine(), asked(), readers := hybrid_readers())
    for _ in range(200):
        _ = drive.step(0)
    assert len(readers._under_way) == 1 + AHEAD
    assert probabilities(drive.finish()) == probabilities(answer(hybrid_engine(), asked()))


def _lost_after(count: int) -> Callable[[int, int, bytes], bytes]:
    """A reader that is gone once it has returned so many forwards."""
    returned = 0

    def change(reader: int, begin: int, data: bytes) -> bytes:
        nonlocal returned
        del reader, begin
        if returned == count:
            raise PeerLost("the reader is gone")
        returned += 1
        return data

    return change


def _altered(data: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    """The file with another description, and checksums that fit it."""
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    description = json.loads(header["__metadata__"]["prefix"])
    change(description)
    text = json.dumps(description)
    header["__metadata__"] = {"prefix": text, "sha256": prefix_files._checksum_of(text)}
    new = json.dumps(header).encode()
    return len(new).to_bytes(8, "little") + new + data[8 + size :]


def _first_rows(description: dict[str, Any]) -> dict[str, Any]:
    return next(part for part in description["rows"] if part is not None)


def _tensor(description: dict[str, Any]) -> list[Any]:
    """Dtype, shape and checksum of an array of rows."""
    return description["tensors"][_first_rows(description)["names"][0]]


HOSTILE: dict[str, Callable[[dict[str, Any]], None]] = {
    "other rows": lambda d: d.update(begin=d["begin"] + 1),
    "other end": lambda d: d.update(end=d["end"] - 1),
    "fewer layers": lambda d: d["rows"].pop(),
    "another kind": lambda d: d["rows"].reverse(),
    "a room of words": lambda d: _first_rows(d).update(room="many"),
    "a huge room": lambda d: _first_rows(d).update(room=1 << 40),
    "too little room": lambda d: _first_rows(d).update(room=1),
    "quantised": lambda d: _first_rows(d).update(quantised=[64, 8]),
    "one array": lambda d: _first_rows(d)["names"].pop(),
    "rows twice": lambda d: _first_rows(d).update(names=_first_rows(d)["names"][:1] * 2),
    "a name of nothing": lambda d: _first_rows(d)["names"].__setitem__(0, "nothing"),
    "no description of rows": lambda d: d.pop("rows"),
    "states": lambda d: d.update(states=[[[], None, None]] * 7),
    "another shape": lambda d: _tensor(d).__setitem__(1, [1] * 4),
    "another dtype": lambda d: _tensor(d).__setitem__(0, "I32"),
    "turned": lambda d: _tensor(d)[1].reverse(),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_file_that_was_not_asked_for_is_refused(name: str) -> None:
    def change(reader: int, begin: int, data: bytes) -> bytes:
        del reader
        return _altered(data, HOSTILE[name]) if begin > CHUNK else data

    readers = hybrid_readers(change=change)
    got = Drive(hybrid_engine(), asked(), readers).finish()
    assert probabilities(got) == probabilities(answer(hybrid_engine(), asked()))
    assert "alone: " in readers.outcome.reason and readers.is_closed


@pytest.mark.parametrize("cut", [0, 9, 500, -1])
def test_a_damaged_file_is_refused(cut: int) -> None:
    def change(reader: int, begin: int, data: bytes) -> bytes:
        del reader, begin
        return data[:cut] + bytes([data[cut] ^ 1]) + (data[cut + 1 :] if cut >= 0 else b"")

    readers = hybrid_readers(change=change)
    got = Drive(hybrid_engine(), asked(), readers).finish()
    assert probabilities(got) == probabilities(answer(hybrid_engine(), asked()))
    assert "alone: " in readers.outcome.reason


@pytest.mark.parametrize("k", [0, 2])
@pytest.mark.parametrize("at", [0, 2, 5])
def test_numbers_that_are_not_finite_cost_the_rows_since_the_last_whole_state(
    at: int, k: int
) -> None:
    """They are noticed where what came back is joined, maybe some forwards later."""
    count = 0

    def change(reader: int, begin: int, data: bytes) -> bytes:
        nonlocal count
        del reader, begin
        count += 1
        return _with_nan(data) if count == at + 1 else data

    alone, mine, readers = hybrid_engine(), hybrid_engine(), hybrid_readers(change=change)
    assert state_behind_prompt(mine, asked(k), readers) == state_behind_prompt(alone, asked(k))
    assert "alone: its numbers are not finite" in readers.outcome.reason and readers.is_closed


@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_one_reader_are_taken_back_where_the_other_ones_cannot_be_used(
    kind: str, at: int
) -> None:
    """The first one's are in its caches when the second one's numbers are found not to be finite.

    With `at` 0 nothing was there before.
    """
    count = 0

    def change(reader: int, begin: int, data: bytes) -> bytes:
        nonlocal count
        del begin
        count += reader
        return _with_nan(data) if reader and count == at + 1 else data

    alone, mine, *others = (of_class(kind, ROOM) for _ in range(4))
    readers, asks = kind_readers(kind, *others, change=change), kind_request(kind)
    assert state_behind_prompt(mine, asks(), readers) == state_behind_prompt(alone, asks())
    assert "alone: its numbers are not finite" in readers.outcome.reason


def _with_nan(data: bytes) -> bytes:
    """The file, the last number of whose first rows is none, with checksums that fit it."""
    begin = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:begin])
    description = json.loads(header["__metadata__"]["prefix"])
    name = _first_rows(description)["names"][0]
    first, end = (begin + offset for offset in header[name]["data_offsets"])
    data = data[: end - 4] + struct.pack("<f", math.nan) + data[end:]
    own = hashlib.sha256(data[first:end]).hexdigest()
    return _altered(data, lambda d: d["tensors"][name].__setitem__(2, own))


def test_each_tensor_for_the_device_begins_where_kernels_can_load_it() -> None:
    contents = [b"abc", b"", b"12345678" * 5, b"x"]
    several = DeviceBytes.of(contents)
    assert [bytes(each) for each in several] == contents
    assert [len(each) for each in several] == [3, 0, 40, 1]
    assert [to_bytes(each.array) for each in several] == contents
    assert [each._begin % 16 for each in several] == [0] * 4


def test_a_cancelled_answer_frees_its_readers() -> None:
    reader = hybrid_engine()
    readers = hybrid_readers(engine=reader)
    mine = hybrid_engine()
    drive = Drive(mine, asked(), readers)
    for _ in range(6):
        _ = drive.step()
    assert reader._engine.keys and reader.cache_bytes() > 0 and mine.cache_bytes() > 0
    drive.close()
    assert readers.is_closed and not reader._engine.keys
    assert reader.cache_bytes() == 0 == mine.cache_bytes()


def test_rows_that_are_not_the_next_ones_are_refused() -> None:
    readers = hybrid_readers()
    drive = Drive(hybrid_engine(), asked(), readers)
    _ = drive.step(0)
    _ = drive.step(0)
    (reader,) = readers._readers
    assert reader.request is not None and reader.request.read is not None
    read, ends = reader.request.read, reader.request.ends
    block, hidden = read._blocks[0]
    (member,) = block.members
    for wrong in (
        replace(block, members=(member._replace(position=member.position + 1),)),
        replace(block, rows=block.rows - 1, tokens=block.tokens[1:]),
        block,  # once more
    ):
        with pytest.raises(InvalidFrame, match="no forward after"):
            read.add(wrong, hidden, PROMPT, ends)
    read._blocks.clear()
    other = replace(block, tokens=(block.tokens[0] + 1, *block.tokens[1:]))
    with pytest.raises(InvalidFrame, match="not the prompt's"):
        read.add(other, hidden, PROMPT, ends)
    drive.close()


# -------------------------------------------------------------------------- beside other answers


def test_two_prompts_share_a_reader_evenly() -> None:
    reader = hybrid_engine()
    prompts = [PROMPT, [*turn(300, 7), *words(CHUNK * 4 + 7, 8)]]
    drives, both = list[Drive](), list[LocalReaders]()
    for prompt in prompts:
        both.append(hybrid_readers(engine=reader))
        drives.append(Drive(hybrid_engine(), asked(1, prompt), both[-1]))
    order = list[int]()
    rows = [0, 0]
    while not all(drive.has_ended for drive in drives):
        for drive in drives:
            if not drive.has_ended:
                _ = drive.step(0)
        _ = reader._engine.step()
        for number, each in enumerate(both):
            request_ = each._readers[0].request
            if request_ is not None and request_.rows > rows[number]:
                rows[number] = request_.rows
                order.append(number)
            while each._readers[0].returned:
                each._take(0, each._readers[0].returned.pop(0))
    first = order[: 2 * min(order.count(0), order.count(1))]
    assert all(set(first[i : i + 2]) == {0, 1} for i in range(0, len(first) - 2, 2))
    for prompt, drive in zip(prompts, drives, strict=True):
        expected = probabilities(answer(hybrid_engine(), asked(1, prompt)))
        assert probabilities(drive.finish()) == expected


def test_a_reader_s_own_answer_has_a_round_after_each_part() -> None:
    """And both have the ids that they have alone."""
    reader = hybrid_engine()
    mine, readers = hybrid_engine(), hybrid_readers(engine=reader)
    own = Drive(reader, request(words(20, 9), 1, 60))
    while not own.events:
        _ = own.step()
    drive = Drive(mine, asked(1), readers)
    while not (own.has_ended and drive.has_ended):
        for each in (own, drive):
            if not each.has_ended:
                _ = each.step()
    alone = [request(words(20, 9), 1, 60), asked(1)]
    for each, again in zip((own, drive), alone, strict=True):
        assert comparable(each.finish())[0] == answer(hybrid_engine(), again).ids


def test_the_stats_say_who_read() -> None:
    got = Drive(hybrid_engine(), asked(), hybrid_readers(CHAIN)).finish()
    stats = got.stats
    assert stats.read_by == ("reader-0", "reader-1") and stats.read_s > 0 and stats.read_bytes > 0


@pytest.mark.parametrize("k", [0, 2])
def test_a_runner_that_has_upper_layers_only(k: int) -> None:
    whole = small_spec(native_mtp=True, prefill_chunk=CHUNK, prefix_cache_bytes=ROOM)
    upper = spec(small_checkpoint(), 2, LAYERS, 1, num_layers=LAYERS, prefill_chunk=CHUNK)
    loaded = load_quietly(whole)
    reader = LayerEngine(load_quietly(upper), EngineOptions.of(upper), time.perf_counter)
    readers = LocalReaders([reader], UPPER, replace(loaded.expected, stage=1))
    engines = [engine_of(loaded, whole) for _ in range(2)]
    require_as_alone(engines[0], engines[1], readers, lambda: asked(k))
    assert reader.cache_bytes() == 0 == reader.live_requests
