"""A stage loads from a folder that holds its own weight files and the headers of the others."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import cast

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten  # pyright: ignore[reportUnknownVariableType]
from models import DEMO

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


LOAD = """
import sys
from pathlib import Path

sys.path += sys.argv[2:]
from exo_node.placement.errors import LoadFailed
from exo_node.shard.model.load import load
from test_partial_copy import spec

try:
    load(spec(Path(sys.argv[1]), partial=True), lambda _: None)
except LoadFailed as fault:
    print(fault.param, fault.message, flush=True)
"""


def test_a_file_that_was_not_copied_is_never_read_as_zeros(tmp_path: Path) -> None:
    """In a process of its own, which a runner is: reads that MLX has begun go on after the error,
    and once failed a computation of the next test."""
    folder, here = copy_of(tmp_path, frozenset()), Path(__file__).parent
    command = [sys.executable, "-c", LOAD, str(folder), str(here), str(here.parents[1])]
    loading = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert loading.stdout.startswith(f"{NOT_COPIED} "), loading.stderr
    assert "was not copied" in loading.stdout
