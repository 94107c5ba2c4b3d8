"""A state that one engine hands to another: the second answers as a cold one, bit for bit."""

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engines import answer, request
from held_prefixes import cache_of, counted
from prefixes import (
    ALIEN,
    FIRST,
    OTHER,
    SECOND,
    TOKENS,
    cold,
    comparable,
)
from prefixes import engine as engine_in_memory
from stored_prefixes import cached_tokens, engine, files, opened, settle
from transfers import KEY, content, handed_over, received

from exo_node.shard.checkpoint.prefix_files import PrefixReceiver


@pytest.mark.parametrize(
    ("k", "tier"),
    [(0, "disk"), pytest.param(1, "memory", marks=pytest.mark.smoke), (3, "memory"), (3, "disk")],
)
def test_the_second_engine_answers_as_a_cold_one(k: int, tier: str, tmp_path: Path) -> None:
    source = engine(opened(tmp_path / "source"))
    for prompt in (FIRST, SECOND):
        _ = answer(source, request(prompt, k, TOKENS))
        settle(source)
    if tier == "disk":
        source = engine(opened(tmp_path / "source"))
    target = engine(opened(tmp_path / "target"))
    got = handed_over(source, target, request(SECOND, k, TOKENS))
    assert comparable(got) == cold(SECOND, k)
    assert (got.stats.cached_tokens, got.stats.cached_tier) == (460, "peer")
    assert target.prefix_hits == {"peer": 460}
    again = answer(target, request(SECOND, k, TOKENS))
    assert comparable(again) == cold(SECOND, k)
    assert (again.stats.cached_tokens, again.stats.cached_tier) == (460, "memory")
    assert counted(cache_of(target)) > 0
    settle(target)
    assert len(files(tmp_path / "target")) == 1
    assert cached_tokens(opened(tmp_path / "target"), SECOND, k) == 460


def test_a_draft_state_moves_with_a_request_that_does_not_draft() -> None:
    source, target = engine_in_memory(), engine_in_memory()
    _ = answer(source, request(FIRST, 2, TOKENS))
    got = handed_over(source, target, request(FIRST, 0, TOKENS))
    assert comparable(got) == cold(FIRST, 0)
    later = answer(target, request(FIRST, 2, TOKENS))
    assert comparable(later) == cold(FIRST, 2)
    assert (later.stats.cached_tokens, later.stats.cached_tier) == (300, "memory")


def test_without_a_draft_state_nothing_is_sent_to_a_request_that_drafts() -> None:
    source = engine_in_memory()
    _ = answer(source, request(FIRST, 0, TOKENS))
    export = source.prefix_lookup.export
    assert export(KEY, FIRST, drafts=True) is None
    assert export(KEY, FIRST, drafts=False) is not None
    assert export(KEY, FIRST, b"another salt", drafts=False) is None
    assert export(KEY, ALIEN, drafts=False) is None


def test_a_state_outlives_its_eviction_while_it_is_sent() -> None:
    source, target = engine_in_memory(), engine_in_memory()
    _ = answer(source, request(FIRST, 2, TOKENS))
    pieces = source.prefix_lookup.export(KEY, FIRST, drafts=True)
    assert pieces is not None
    cache_of(source).evict()
    state = received(target, request(FIRST, 2, TOKENS), b"".join(pieces()))
    got = answer(target, request(FIRST, 2, TOKENS, received=state))
    assert (comparable(got), got.stats.cached_tokens) == (cold(FIRST, 2), 300)


def test_what_is_cached_here_meanwhile_is_used_in_its_place() -> None:
    source, target = engine_in_memory(), engine_in_memory()
    _ = answer(source, request(FIRST, 2, TOKENS))
    state = received(target, request(FIRST, 2, TOKENS), content(source, request(FIRST, 2)))
    _ = answer(target, request(SECOND, 2, TOKENS))
    got = answer(target, request(FIRST, 2, TOKENS, received=state))
    assert (got.stats.cached_tokens, got.stats.cached_tier) == (300, "memory")
    assert state.held_bytes == 0
    with pytest.raises(ValueError, match="no more than the 300 that are here"):
        _ = received(target, request(FIRST, 2), content(source, request(FIRST, 2)))


def _changed(data: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    """The file with another description, and checksums that fit it."""
    from exo_node.shard.checkpoint import prefix_files

    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    description = json.loads(header["__metadata__"]["prefix"])
    change(description)
    text = json.dumps(description)
    checksum = prefix_files._checksum_of(text)  # pyright: ignore[reportPrivateUsage]
    header["__metadata__"] = {"prefix": text, "sha256": checksum}
    new = json.dumps(header).encode()
    return len(new).to_bytes(8, "little") + new + data[8 + size :]


def _set(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda description: description.update(fields)


def _without(field: str) -> Callable[[dict[str, Any]], None]:
    def change(description: dict[str, Any]) -> None:
        del description[field]

    return change


def _with_room(room: Any) -> Callable[[dict[str, Any]], None]:
    def change(description: dict[str, Any]) -> None:
        parts = (part for span in description["spans"] for part in span if part is not None)
        next(parts)["room"] = room

    return change


@pytest.mark.parametrize(
    "change",
    [
        _set(key="another model"),
        _set(rows=160),
        _set(rows=300.0),
        _set(rows="300"),
        _set(name="a" * 40),
        _set(name="a" * 40 + "-mtp"),
        _set(begin=160),
        _set(parent="another"),
        _set(head=None),
        _set(first_turn=-1),
        _set(tensors={}),
        _with_room(1 << 40),
        _with_room(0.5),
        _without("key"),
        _without("spans"),
    ],
)
def test_another_state_than_the_prompts_is_refused_before_its_tensors_come(
    change: Callable[[dict[str, Any]], None],
) -> None:
    source, target = engine_in_memory(), engine_in_memory()
    engine_request = request(FIRST, 2, TOKENS)
    _ = answer(source, engine_request)
    data = _changed(content(source, engine_request), change)
    beginning = data[: 8 + int.from_bytes(data[:8], "little")]
    with pytest.raises((ValueError, LookupError, TypeError)) as caught:
        _ = received(target, engine_request, beginning)
    assert "ends too early" not in str(caught.value)


@pytest.mark.smoke
def test_a_state_of_another_prompt_is_refused() -> None:
    source, target = engine_in_memory(), engine_in_memory()
    _ = answer(source, request(ALIEN, 2, TOKENS))
    with pytest.raises(ValueError, match="of another prompt"):
        _ = received(target, request(SECOND, 2, TOKENS), content(source, request(ALIEN, 2)))


@pytest.mark.smoke
def test_a_changed_byte_anywhere_is_noticed() -> None:
    source, target = engine_in_memory(), engine_in_memory()
    engine_request = request(OTHER, 2, TOKENS)
    _ = answer(source, engine_request)
    data = content(source, engine_request)
    size = 8 + int.from_bytes(data[:8], "little")
    for place in (0, 9, size // 2, size - 12, size, (size + len(data)) // 2, len(data) - 1):
        flipped = bytearray(data)
        flipped[place] ^= 1
        with pytest.raises((ValueError, LookupError, TypeError)):
            _ = received(target, engine_request, bytes(flipped))
    for cut in (0, 5, 8, size - 1, size, len(data) - 1):
        with pytest.raises(ValueError, match="too early"):
            _ = received(target, engine_request, data[:cut])
    with pytest.raises(ValueError, match="more bytes than it describes"):
        _ = received(target, engine_request, data + b"\0")


def test_a_state_that_does_not_fit_the_model_costs_no_answer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Such as one whose rows are missing in a layer, after checksums that fit."""
    source, target = engine_in_memory(), engine_in_memory()
    engine_request = request(FIRST, 2, TOKENS)
    _ = answer(source, engine_request)

    def drop(description: dict[str, Any]) -> None:
        del description["spans"][0]

    state = received(target, engine_request, _changed(content(source, engine_request), drop))
    with caplog.at_level(logging.WARNING):
        got = answer(target, replace(engine_request, received=state))
    assert (comparable(got), got.stats.cached_tier) == (cold(FIRST, 2), "")
    assert "does not have its rows in every layer" in caplog.text
    assert state.held_bytes == 0


@pytest.mark.smoke
def test_more_bytes_than_there_is_room_for_are_refused_before_they_come() -> None:
    source = engine_in_memory()
    engine_request = request(FIRST, 2, TOKENS)
    _ = answer(source, engine_request)
    data = content(source, engine_request)

    def check(_: Mapping[str, Any]) -> None:
        pass

    size = 8 + int.from_bytes(data[:8], "little")
    PrefixReceiver(len(data) - size, check).feed(data)
    with pytest.raises(ValueError, match="more than the prefix cache has room for"):
        PrefixReceiver(len(data) - size - 1, check).feed(data[:size])
    with pytest.raises(ValueError, match="no safetensors"):
        PrefixReceiver(len(data), check).feed((1 << 40).to_bytes(8, "little") + b"{")
