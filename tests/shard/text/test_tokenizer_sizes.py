"""Tokenizers that would take minutes to load are refused by name, and known sizes are not."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from exo_node.placement.errors import InvalidCheckpoint
from exo_node.shard.text import tokenizer_folder
from exo_node.shard.text.tokenizer_folder import require_reasonable

SMALL = 1_000
VOCABULARY: dict[str, Any] = {str(number): number for number in range(SMALL + 1)}


def write_file(folder: Path, name: str, text: str) -> Path:
    (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize("merge", ['["a","b"]', '"a b"'])
def test_two_million_merges_are_refused_in_an_instant(merge: str, tmp_path: Path) -> None:
    """Compared with one parse of the same text: loading took hundreds of times as long."""
    merges = ",".join([merge] * 2_000_000)
    model = f'{{"type":"BPE","vocab":{{"a":0}},"merges":[{merges}]}}'
    folder = write_file(tmp_path, "tokenizer.json", f'{{"model":{model}}}')
    began = time.process_time()
    _ = json.loads(model)
    parsed_s, began = time.process_time() - began, time.process_time()
    with pytest.raises(InvalidCheckpoint, match=r"tokenizer.json has [\d,]+ .*merges, over the li"):
        require_reasonable(folder)
    assert time.process_time() - began < 10 * parsed_s


@pytest.mark.parametrize(
    ("name", "text", "what"),
    [
        ("tokenizer.json", json.dumps({"model": {"vocab": VOCABULARY}}), "1,001 tokens"),
        ("vocab.json", json.dumps(VOCABULARY), "1,001 tokens"),
        ("merges.txt", "a b\n" * 1_001, "1,001 lines"),
        ("tokenizer.json", json.dumps({"model": ["x"] * 3_001}), "3,002 tokens and parts"),
    ],
)
def test_each_of_a_tokenizers_files_is_counted(
    name: str, text: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_folder, "MAX_ENTRIES", SMALL)
    with pytest.raises(InvalidCheckpoint, match=f"{name} has {what}") as caught:
        require_reasonable(write_file(tmp_path, name, text))
    assert "Use the tokenizer of the model that this one was made of" in caught.value.message


@pytest.mark.parametrize(
    "text",
    [
        json.dumps({"model": {"vocab": {"a": 0}, "merges": [["a", "b"]] * SMALL}}),
        json.dumps({"added_tokens": ["x"] * 2_000, "model": None}),
        '"' * 4_000,
    ],
)
def test_what_is_within_the_limits_or_no_json_is_left_to_the_library(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_folder, "MAX_ENTRIES", SMALL)
    require_reasonable(write_file(tmp_path, "tokenizer.json", text))
