"""Makes a quantised copy of a checkpoint with mlx-lm's quantiser, a few tensors at a time."""

# mlx and mlx_lm are typed in part only.
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

import contextlib
import io
import json
import shutil
from pathlib import Path
from typing import Any, Final

from mlx.utils import tree_flatten
from mlx_lm.utils import quantize_model

from ....placement.errors import InvalidCheckpoint
from ...checkpoint.chat_format import EXTRA_FILES
from ...checkpoint.checkpoint import INDEX_FILE, Checkpoint, is_weight_file
from ...model.open_model import open_model
from .shards import SHARD_BYTES, Report, write_shards

_TEXTS: Final = (".json", ".jinja", ".model", ".tiktoken", ".txt")
_OWN: Final = ("config.json", INDEX_FILE)


def convert(
    source: Checkpoint,
    target: Path,
    bits: int,
    report: Report,
    *,
    group_size: int = 64,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes the backbone of `source`, quantised, into the folder `target`, which exists.

    A draft head is not included: `graft` adds it. Raises InvalidCheckpoint and OSError.
    """
    original_config: dict[str, Any] = dict(source.config)
    if "quantization" in original_config:
        raise InvalidCheckpoint(
            f"{source.folder.name} is quantised already; convert the original repository",
            param="quantization",
        )
    model = open_model(source.folder)
    with contextlib.redirect_stdout(io.StringIO()):  # it prints the bits of a weight
        model, config = quantize_model(model, original_config, group_size, bits)
    weights = dict(tree_flatten(model.parameters()))
    del model
    sizes = {name: array.nbytes for name, array in weights.items()}
    write_shards(sizes, lambda name: {name: weights.pop(name)}, target, report, shard_bytes)
    (target / "config.json").write_text(json.dumps(config, indent=1))
    _copy_texts(source.folder, target)


def _copy_texts(source: Path, target: Path) -> None:
    """Copies tokenizer, chat template and sampling; never code."""
    for path in source.iterdir():
        is_text = path.name.endswith(_TEXTS) and path.name not in _OWN
        if is_text and path.is_file() and not is_weight_file(path.name):
            _ = shutil.copyfile(path, target / path.name)
    for name in EXTRA_FILES:
        if (source / name).is_file():
            (target / name).parent.mkdir(exist_ok=True)
            _ = shutil.copyfile(source / name, target / name)
