"""A stage loads from a folder that holds its own weight files and the headers of the others."""

import shutil
from pathlib import Path
from typing import cast

import mlx.core as mx
import pytest
from mlx import nn
from mlx.utils import tree_flatten  # pyright: ignore[reportUnknownVariableType]
from models import DEMO

from exo_node.placement.errors import LoadFailed
from exo_node.proto import peer_pb2 as pb
from exo_node.shard.checkpoint.checkpoint import read_checkpoint
from exo_node.shard.checkpoint.headers import read_header
from exo_node.shard.checkpoint.stage_files import HEADERS, NOT_COPIED, files_of_stage
from exo_node.shard.model.load import load

FIRST, END, LAYERS = 12, 16, 16


def spec(folder: Path, *, partial: bool) -> pb.StageSpec:
    return pb.StageSpec(
        placement="p",
        model="demo",
        stage=1,
        num_stages=2,
        first_layer=FIRST,
        end_layer=END,
        num_layers=LAYERS,
        dtype="float32",
        prefill_chunk=64,
        context_length=256,
        checkpoint_sha256=read_checkpoint(DEMO).fingerprint,
        path=str(folder),
        partial=partial,
    )


def copy_of(folder: Path, weight_files: frozenset[str]) -> Path:
    for path in DEMO.iterdir():
        if path.suffix in (".json", ".jinja") or path.name in weight_files:
            shutil.copy(path, folder)
        elif path.suffix == ".safetensors":
            (folder / HEADERS).mkdir(exist_ok=True)
            header, _ = read_header(path)
            whole = len(header).to_bytes(8, "little") + header
            _ = (folder / HEADERS / path.name).write_bytes(whole)
    return folder


def arrays(layer: nn.Module) -> list[mx.array]:
    return [cast("mx.array", value) for _, value in tree_flatten(layer.parameters())]


def test_the_stage_has_the_weights_of_a_whole_copy(tmp_path: Path) -> None:
    tensors = read_checkpoint(DEMO).tensors.values()
    needed = files_of_stage(tensors, FIRST, END, LAYERS, generator=False)
    assert needed < {tensor.file for tensor in tensors}
    part = load(spec(copy_of(tmp_path, needed), partial=True), lambda _: None)
    whole = load(spec(DEMO, partial=False), lambda _: None)
    assert part.fingerprint == whole.fingerprint
    for own, other in zip(part.model.own_layers, whole.model.own_layers, strict=True):
        for value, expected in zip(arrays(own), arrays(other), strict=True):
            assert mx.array_equal(value, expected)


def test_a_file_that_was_not_copied_is_never_read_as_zeros(tmp_path: Path) -> None:
    with pytest.raises(LoadFailed, match="was not copied") as caught:
        _ = load(spec(copy_of(tmp_path, frozenset()), partial=True), lambda _: None)
    assert caught.value.param == NOT_COPIED
