"""The publisher's suggestions: usable values hold, each other one is left out and named."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from exo_node.placement.card import SamplingDefaults
from exo_node.placement.sampling_values import API_DEFAULTS, model_sampling, usable_value
from exo_node.shard.checkpoint.generation_config import read_generation_config

QWEN = {
    "do_sample": True,
    "temperature": 0.7,
    "top_p": 0.8,
    "top_k": 20,
    "repetition_penalty": 1.05,
    "eos_token_id": [151645, 151643],
}


def write(folder: Path, content: object) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(content))
    return folder


def test_every_value_of_a_usual_file_is_read(tmp_path: Path) -> None:
    read = read_generation_config(write(tmp_path, QWEN))
    assert read.sampling == {
        "temperature": 0.7,
        "top_p": 0.8,
        "top_k": 20,
        "repetition_penalty": 1.05,
    }
    assert type(read.sampling["top_k"]) is int
    assert (read.ends, read.notes) == ((151645, 151643), ())


HOSTILE: list[Any] = [
    *("0.7", "hot", "", None, [], [0.7], {}, {"a": 1}, True, False),
    *(float("nan"), float("inf"), -float("inf"), -0.1, -1, 1e308, 10**400, -(10**400), 11),
]


@pytest.mark.parametrize("name", API_DEFAULTS)
@pytest.mark.parametrize("value", HOSTILE, ids=lambda value: repr(value)[:20])
def test_a_value_that_a_parameter_cannot_have_is_left_out_and_named(
    tmp_path: Path, name: str, value: Any
) -> None:
    if (name, value) == ("top_k", 11):
        value = 2**40
    before = QWEN | {"min_p": 0.1}
    read = read_generation_config(write(tmp_path, before | {name: value}))
    assert read.sampling == {n: before[n] for n in API_DEFAULTS if n != name}
    [note] = read.notes
    assert f"generation_config.json has {name} = " in note
    assert len(note) < 300
    assert note.isprintable()


@pytest.mark.parametrize("name", API_DEFAULTS)
def test_the_bounds_are_those_of_a_card(name: str) -> None:
    """Within them a card takes the value, too, and beyond them neither does."""
    for value in (0, 1e-9, 0.5, 1, 1.5, 2, 2.5, 3, 10, 10.5, 2**21, 2**21 + 1, -1e-9):
        number = int(value) if name == "top_k" and value == int(value) else value
        try:
            taken = getattr(SamplingDefaults.model_validate({name: number}), name)
        except ValueError:
            taken = None
        assert usable_value(name, number) == taken, value


@pytest.mark.parametrize(
    ("do_sample", "sampling", "notes"),
    [
        (False, {"temperature": 0.0, "repetition_penalty": 1.05}, 0),
        (True, {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}, 0),
        ("no", {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}, 1),
        (None, {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}, 1),
    ],
)
def test_a_publisher_who_does_not_sample_means_greedy(
    tmp_path: Path, do_sample: object, sampling: dict[str, float], notes: int
) -> None:
    read = read_generation_config(write(tmp_path, QWEN | {"do_sample": do_sample}))
    assert (read.sampling, len(read.notes)) == (sampling, notes)


ENDS: list[tuple[object, tuple[int, ...], bool]] = [
    ([4095, None], (4095,), True),
    ({}, (), True),
    ("4095", (), True),
    (4095.0, (), True),
    (False, (), True),
    ([True, 1], (1,), True),
    ([1.0, 1], (1,), True),
    ([[1]], (), True),
    (-1, (), True),
    (10**400, (), True),
    ([0, 2**21 - 1, 2**21], (0, 2**21 - 1), True),
    (["x"] * 100_000, (), True),
    (0, (0,), False),
    ([], (), False),
    (None, (), False),
]


@pytest.mark.parametrize(("value", "ends", "noted"), ENDS, ids=lambda value: repr(value)[:20])
def test_the_end_tokens_are_the_ids_that_are_found(
    tmp_path: Path, value: object, ends: tuple[int, ...], noted: bool
) -> None:
    read = read_generation_config(write(tmp_path, {"eos_token_id": value, "top_k": 3}))
    assert (read.ends, read.sampling) == (ends, {"top_k": 3})
    assert bool(read.notes) == noted
    assert all("eos_token_id" in note and len(note) < 300 for note in read.notes)


def test_a_zero_of_a_card_is_a_value() -> None:
    chosen = model_sampling({"temperature": 0.0, "top_k": 0}, {"temperature": 0.7, "top_k": 20})
    assert chosen["temperature"] == {"value": 0.0, "source": "card"}
    assert chosen["top_k"] == {"value": 0, "source": "card"}


def spoiled(content: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(content)


SPOILED: dict[str, Callable[[Path], object]] = {
    "empty": spoiled(b""),
    "cut": spoiled(b'{"temperature": 0.7'),
    "two commas": spoiled(b'{"temperature": 0.7,,}'),
    "null": spoiled(b"null"),
    "a list": spoiled(b"[]"),
    "not UTF-8": spoiled(b'{"temperature": 0.7, "a": "\xff"}'),
    "deep": spoiled(b"[" * 200_000),
    "huge": lambda path: os.truncate(_touched(path), 1 << 30),
    "a folder": Path.mkdir,
    "a pipe": os.mkfifo,
    "no file's link": lambda path: path.symlink_to("nowhere"),
    "endless": lambda path: path.symlink_to("/dev/zero"),
}


def _touched(path: Path) -> Path:
    path.touch()
    return path


@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED)
def test_a_file_that_cannot_be_read_counts_as_missing_and_is_named(
    tmp_path: Path, spoil: Callable[[Path], object]
) -> None:
    _ = spoil(tmp_path / "generation_config.json")
    read = read_generation_config(tmp_path)
    assert (read.sampling, read.ends) == ({}, ())
    [note] = read.notes
    assert "generation_config.json" in note


READABLE = {
    "a comma too many": b'{"temperature": 0.7,\r\n }',
    "commas in lists and texts": b'{"a": [1, 2, ], "b": ",}\\",]", "temperature": 0.7 , }',
    "a byte order mark": b'\xef\xbb\xbf{"temperature": 0.7}',
    "UTF-16": '{"temperature": 0.7}'.encode("utf-16"),
    "UTF-32": '{"temperature": 0.7,}'.encode("utf-32"),
    "a key that occurs twice": b'{"temperature": 0.1, "temperature": 0.7}',
}


@pytest.mark.parametrize("content", READABLE.values(), ids=READABLE)
def test_a_file_with_a_slip_is_read(tmp_path: Path, content: bytes) -> None:
    _ = (tmp_path / "generation_config.json").write_bytes(content)
    read = read_generation_config(tmp_path)
    assert (read.sampling, read.notes) == ({"temperature": 0.7}, ())
