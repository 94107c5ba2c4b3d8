"""The child process of `exo-node models import`: one GGUF file becomes one model's folder.

Started as `python -P -m exo_node.shard.tools.convert.import_gguf`. The result goes to stdout as
JSON, progress to stderr.
"""

import json
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from ...model import loader_import  # noqa: F401  # pyright: ignore[reportUnusedImport]

# What it does has to come before MLX is imported.
# isort: split
from tokenizers import Tokenizer

from ....placement.errors import InvalidCheckpoint
from ...checkpoint.checkpoint import read_checkpoint
from ...checkpoint.gguf_file import GgufFile, read_gguf
from ...checkpoint.headers import quote
from ...model.open_model import open_model
from ..child import ChildRequest, run_child
from .gguf_arrays import GROUP, Arrays, kept_bits, read_arrays, stored_bytes, written_bytes
from .gguf_model import GgufModel, model_of
from .gguf_tokenizer import text_files
from .shards import SHARD_BYTES, Bits, ProgressNotes, Report, new_folder, write_shards

_WEIGHT: Final = ".weight"


class ImportRequest(ChildRequest):
    """The command's request.

    `bits`: of what does not stay as it is, or None for bfloat16. `dense`: everything does.
    """

    source: str
    target: str
    bits: Bits | None
    dense: bool


def run(request: ImportRequest) -> dict[str, Any]:
    """Makes the folder; returns the result as JSON values. Raises ExoNodeError and OSError."""
    target = Path(request.target)
    file = read_gguf(Path(request.source))
    counts = import_gguf(file, target, request.bits, dense=request.dense)
    return {"folder": request.target, "tensors": counts}


def import_gguf(
    file: GgufFile,
    target: Path,
    bits: int | None = None,
    report: Report | None = None,
    *,
    dense: bool = False,
    shard_bytes: int = SHARD_BYTES,
) -> Mapping[str, int]:
    """Writes the folder `target`; returns how many matrices are stored with which bits, "16" for
    bfloat16. Raises InvalidCheckpoint, LoadFailed for a missing package, and OSError."""
    parts = file.values.get("split.count", 1)
    if parts not in (0, 1):
        raise InvalidCheckpoint(
            f"{file.path.name} is one of {quote(parts)} parts of a model; join them (llama.cpp's "
            "`llama-gguf-split --merge` does) and import the whole file",
            param="split.count",
        )
    version = _version(file)
    model, texts = model_of(file), text_files(file)
    file.require_bytes(
        {tensor.name: stored_bytes(file, tensor) for tensor in file.tensors.values()}
    )
    chosen = {name: None if dense else _bits(file, name, bits) for name in model.names}
    sizes = {name: written_bytes(file.tensors[name], each) for name, each in chosen.items()}
    with new_folder(target) as folder:
        _require_room(folder, sum(sizes.values()))
        config = model.config | _end_tokens(texts) | _quantization(model, chosen)
        for name, content in {"config.json": config, **texts}.items():
            _ = (folder / name).write_text(json.dumps(content, ensure_ascii=False))
        _check_texts(file, folder)
        write_shards(
            sizes,
            lambda name: _named(file, model, name, chosen[name]),
            folder,
            report or ProgressNotes().show,
            shard_bytes,
        )
        _ = read_checkpoint(folder)
        _ = open_model(folder)  # mlx-lm's class takes each tensor and its shape
        if _version(file) != version:
            raise file.fault("changed while it was read; another program may still be writing it")
    matrices = (each for name, each in chosen.items() if len(file.tensors[name].shape) > 1)
    return dict(Counter(str(each or 16) for each in matrices))


def _version(file: GgufFile) -> tuple[int, int, int]:
    status = file.path.stat()
    return status.st_size, status.st_mtime_ns, status.st_ino


def _bits(file: GgufFile, name: str, bits: int | None) -> int | None:
    tensor = file.tensors[name]
    if not name.endswith(_WEIGHT) or len(tensor.shape) < 2:
        return None
    # Routers are small, and their bits count for more.
    fits = tensor.shape[-1] % GROUP == 0 and ".ffn_gate_inp" not in name
    return kept_bits(tensor) or (bits if fits else None)


def _named(file: GgufFile, model: GgufModel, name: str, bits: int | None) -> Arrays:
    """A tensor's arrays with their names in the checkpoint, its rows in the order there."""
    tensor = file.tensors[name]
    plus_one = model.norms_plus_one and name.endswith("norm.weight")
    arrays = read_arrays(file, tensor, bits, 1.0 if plus_one else 0.0)
    stem, _, end = model.names[name].rpartition(".")
    if end != _WEIGHT[1:]:
        return {model.names[name]: model.ordered(name, arrays["weight"])}
    return {f"{stem}.{part}": model.ordered(name, array) for part, array in arrays.items()}


def _quantization(model: GgufModel, chosen: Mapping[str, int | None]) -> dict[str, Any]:
    """The fields of config.json: the most frequent bits, and the matrices with others."""
    layers = {model.names[name].removesuffix(_WEIGHT): b for name, b in chosen.items() if b}
    if not layers:
        return {}
    usual = Counter(layers.values()).most_common(1)[0][0]
    others = {
        layer: {"group_size": GROUP, "bits": bits}
        for layer, bits in layers.items()
        if bits != usual
    }
    fields = {"group_size": GROUP, "bits": usual, "mode": "affine", **others}
    return {"quantization": fields, "quantization_config": fields}


def _end_tokens(texts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    generation = texts["generation_config.json"]
    return {key: value for key, value in generation.items() if key.endswith("_token_id")}


def _check_texts(file: GgufFile, folder: Path) -> None:
    """Checks that the tokenizers library reads what was written. Raises InvalidCheckpoint."""
    try:
        _ = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library raises no narrower one; the command prints it
        raise file.fault(f"has a tokenizer that cannot be read ({error})") from error


def _require_room(folder: Path, size: int) -> None:
    if (free := shutil.disk_usage(folder).free) < size:
        raise OSError(f"the model takes {size / 1e9:.2f} GB and the disk has {free / 1e9:.2f} GB")


def _run(request: ImportRequest) -> int:
    print(json.dumps(run(request)))
    return 0


if __name__ == "__main__":
    run_child("models import", ImportRequest, _run)
