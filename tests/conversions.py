"""Checkpoints without a head, as conversions write them, and requests for conversions."""

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx

from exo_node.shard.tools.convert.main import ConvertRequest


def strip_head(source: Path, folder: Path) -> Path:
    """Copies a checkpoint without its `mtp.*` tensors, as a conversion does."""
    shutil.copytree(source, folder)
    for path in folder.glob("model*.safetensors"):
        weights: dict[str, mx.array] = mx.load(str(path))  # type: ignore[assignment]
        backbone = {name: array for name, array in weights.items() if "mtp." not in name}
        mx.eval(backbone)
        mx.save_safetensors(str(path), backbone, {"format": "mlx"})
    index = folder / "model.safetensors.index.json"
    if index.exists():
        table = json.loads(index.read_text())
        files = table["weight_map"].items()
        table["weight_map"] = {name: file for name, file in files if "mtp." not in name}
        index.write_text(json.dumps(table))
    return folder


def convert_request(source: Path, target: Path, **changes: Any) -> ConvertRequest:
    fields: dict[str, Any] = {
        "source": str(source), "target": str(target), "bits": None, "head": "", "head_files": [],
        "head_bits": None,
    }  # fmt: skip
    return ConvertRequest(**(fields | changes))
