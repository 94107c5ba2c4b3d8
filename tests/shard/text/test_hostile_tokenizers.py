"""Tokenizer files that would take minutes or all memory to read are refused by name."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from embedders import encoder
from engines import DEMO

from exo_node.placement.errors import InvalidCheckpoint
from exo_node.shard.text.codec import TextCodec


def _endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _huge(path: Path) -> None:
    with path.open("wb") as file:
        _ = file.truncate(1 << 30)


def _deep(path: Path) -> None:
    _ = path.write_text('{"a":' + "[" * 200_000 + "]" * 200_000 + "}")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("spoil", [_endless, _pipe, _huge])
def test_a_file_without_an_end_is_refused(
    tmp_path: Path, name: str, spoil: Callable[[Path], None]
) -> None:
    _copied(tmp_path, name, spoil)
    with pytest.raises(InvalidCheckpoint, match=name):
        _ = TextCodec.load(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_deep_json_is_refused(tmp_path: Path, name: str) -> None:
    _copied(tmp_path, name, _deep)
    with pytest.raises(InvalidCheckpoint, match=tmp_path.name):
        _ = TextCodec.load(tmp_path)


@pytest.mark.parametrize("family", ["bert", "xlm_roberta"])
def test_a_folder_without_tokens_for_text_is_refused(tmp_path: Path, family: str) -> None:
    """transformers makes a tokenizer of control tokens alone for it."""
    _ = shutil.copy(encoder(family) / "config.json", tmp_path)
    with pytest.raises(InvalidCheckpoint, match="no tokens for text") as refused:
        _ = TextCodec.load(tmp_path)
    assert refused.value.param == "tokenizer.json"


def _copied(folder: Path, name: str, spoil: Callable[[Path], None]) -> None:
    for path in DEMO.iterdir():
        if path.suffix in (".json", ".jinja"):
            shutil.copy(path, folder)
    (folder / name).unlink()
    spoil(folder / name)
