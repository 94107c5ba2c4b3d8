"""A checkpoint's pre-flight: whether it would load here, and its MTP head. Blocks."""

from pathlib import Path
from typing import Any

from ...placement.cluster import ClusterView
from ...placement.errors import InvalidCheckpoint
from ...placement.fitting import fit
from ...placement.ids import ModelId
from ...placement.parse_card import derive_card
from ...shard.checkpoint.checkpoint import read_checkpoint
from ...shard.checkpoint.head_tensors import HeadFound, find_head
from ...shard.checkpoint.model_classes import has_class
from .library import KnownModel, ModelLibrary
from .listing import facts


def check(library: ModelLibrary, folder: Path, view: ClusterView) -> dict[str, Any]:
    """The facts of a checkpoint. Raises InvalidCheckpoint and InvalidCard if it would not load."""
    checkpoint = read_checkpoint(folder)
    if not has_class(checkpoint.config):
        kind = checkpoint.config.get("model_type")
        raise InvalidCheckpoint(
            f"{folder.name}: mlx-lm has no class for model_type {str(kind)[:80]!r}; choose another "
            "model, or a newer mlx-lm",
            param="config.json",
        )
    if not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model")):
        raise InvalidCheckpoint(
            f"{folder.name} has no tokenizer.json or tokenizer.model; copy it from the original "
            "repository",
            param="tokenizer.json",
        )
    size = sum(tensor.nbytes for tensor in checkpoint.tensors.values())
    card = derive_card(ModelId(folder.name), checkpoint.config, size)
    head = find_head(checkpoint)
    verdict: dict[str, Any] = {"found": False, "reason": getattr(head, "reason", "")}
    if isinstance(head, HeadFound):
        bits = sorted(set(head.bits.values()))
        verdict = {"found": True, "bytes": head.nbytes, "bits": bits, "files": list(head.files)}
    files = library.file_facts(KnownModel(card, folder))
    return {
        "folder": str(folder),
        "tensors": len(checkpoint.tensors),
        "fingerprint": checkpoint.fingerprint,
        "model_type": card.model_type,
        **facts(card, fit(card, view), files),
        "head": verdict,
        "notes": list(files.notes),
    }
