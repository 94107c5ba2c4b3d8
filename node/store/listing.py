"""Models as lists show them: size, format, whether each fits, its MTP state in words; and the files
of a checkpoint. Blocks.

`on_disk`, `catalogue` and `describe` are the lists of this machine alone, for commands that need no
running node.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from ...placement.card import ModelCard
from ...placement.cluster import ClusterView
from ...placement.config import ENCODERS
from ...placement.drafting import HeadState, drafter_words
from ...placement.errors import InvalidCheckpoint
from ...placement.fitting import Fit, fit
from ...placement.ids import ModelId
from ...placement.options import usual_context
from ...placement.sampling_values import model_sampling
from ...shard.checkpoint.checkpoint import read_checkpoint
from ...shard.checkpoint.head_tensors import HeadFound, find_head
from ...shard.checkpoint.model_classes import has_class, lacking
from ...shard.checkpoint.vision import ADD_ENCODERS, has_extra
from .file_facts import FileFacts
from .library import KnownModel, ModelLibrary


def check(folder: Path, model_id: str) -> dict[str, Any]:
    """The facts of a checkpoint's files. Raises InvalidCheckpoint if it would not load."""
    checkpoint = read_checkpoint(folder)
    if not has_class(checkpoint.config):
        raise InvalidCheckpoint(
            f"{model_id}: {lacking(checkpoint.config)}; choose another model, or a newer mlx-lm",
            param="config.json",
        )
    if not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model")):
        raise InvalidCheckpoint(
            f"{model_id} has no tokenizer.json or tokenizer.model; copy it from the original "
            "repository",
            param="tokenizer.json",
        )
    head = find_head(checkpoint)
    verdict: dict[str, Any] = {"found": False, "reason": getattr(head, "reason", "")}
    if isinstance(head, HeadFound):
        sizes = {"bytes": head.nbytes, "quantised": head.quantised}
        verdict = {"found": True, **sizes, "files": list(head.files)}
    facts = {"tensors": len(checkpoint.tensors), "fingerprint": checkpoint.fingerprint}
    return {**facts, "head": verdict}


READABLE: Final = 8.0
"""Tokens a second: slower than people read."""
_RECOMMENDED: Final = 8


def facts(card: ModelCard, fit: Fit, files: FileFacts) -> dict[str, Any]:
    """The part of an entry of `GET /v1/models` that the card, the files and the nodes decide."""
    writes = fit.seconds > 0 and not embeds(card, files)
    return {
        "size_bytes": card.weight_bytes,
        "quantization": card.quantization,
        "format": format_of(card),
        "drafts": card.drafts is not None,
        "parameters": parameters(card.weight_bytes, card.quantization, format_of(card)),
        "model_type": card.model_type,
        "capabilities": list(files.capabilities),
        "digest": files.digest or None,
        "sampling": None if card.embeds else model_sampling(card.sampling.by_field, files.sampling),
        "fits": {
            "nodes": fit.nodes,
            "needed_bytes": fit.needed_bytes,
            "context_length": fit.context or None,
            "shortened": 0 < fit.context < usual_context(card),
            "tokens_per_second": round(1 / fit.seconds, 1) if writes else None,
            "estimated": not fit.is_measured if writes else None,
            "reason": fit.reason or None,
            "dtype": fit.dtype or None,
            "dtype_reason": fit.dtype_reason or None,
        },
    }


def embeds(card: ModelCard, files: FileFacts) -> bool:
    """Whether the model gives embeddings and no text."""
    return card.embeds or "embeddings" in files.capabilities


def embedding_words(card: ModelCard) -> str:
    """The purpose of a model of embeddings, and what it needs that is not here."""
    lacks = card.model_type in ENCODERS and not has_extra()
    return f"embeds; no chat{f'; {ADD_ENCODERS}' if lacks else ''}"


def parameters(weight_bytes: int, bits: int | None, format: str) -> int:
    """Parameters, estimated from the size: a quantised one has half a bit of scale and bias."""
    each = (bits + 0.5) / 8 if bits else {"float32": 4, "FP8": 1}.get(format, 2)
    return round(weight_bytes / each)


def partial_entry(model: ModelId, size: int) -> dict[str, Any]:
    """The entry of a partial copy of a model that no reachable node has whole."""
    return {
        "id": model,
        "loaded": False,
        "downloaded": False,
        "size_bytes": size,
        "partial_bytes": size,
        "error": f"only a part of it is here, copied from another node: a load goes on with it "
        f"while that node runs, and `exo-node models rm {model}` deletes it",
    }


def format_of(card: ModelCard) -> str:
    """How the weights are stored, for a person: `4-bit`, `FP8` or the name of a float."""
    if card.quantization is not None:
        return f"{card.quantization}-bit"
    return "FP8" if card.fp8 else card.dtype


def mtp_words(card: ModelCard, head: HeadState) -> str:
    """Whether the model can draft for itself, before switches and placements are asked."""
    if head.loaded and card.drafts is not None:
        drafter = f"{drafter_words(card)} is here" if card.drafter else "head found"
        return f"{drafter}; drafts up to {card.drafts.max_k} a round"
    return head.reason or "no head"


def recommended(entries: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Entries of the catalogue that fit and answer, the best first; at most one of each model.

    Those with a usual context come first, then those at a readable speed, of them those with native
    MTP; then the most weights
    count, and of one model the format with the most bits.
    """
    answering = [e for e in entries if "embeddings" not in (e.get("capabilities") or ())]
    fitting = [e for e in answering if e["fits"] and e["fits"]["nodes"] and e["id"] != "demo"]
    chosen: dict[object, Mapping[str, Any]] = {}
    for entry in sorted(fitting, key=_rank):
        _ = chosen.setdefault(entry.get("variant_of") or entry["id"], entry)
    return list(chosen.values())[:_RECOMMENDED]


def _rank(entry: Mapping[str, Any]) -> tuple[object, ...]:
    speed = entry["fits"].get("tokens_per_second") or 0.0
    bits = entry.get("quantization") or 16
    return (
        entry["fits"].get("shortened", False),
        speed < READABLE,
        not entry.get("drafts"),
        -entry["size_bytes"] / bits,
        -bits,
    )


def on_disk(library: ModelLibrary, view: ClusterView) -> list[dict[str, Any]]:
    """The models on this disk in the shape of `GET /v1/models`."""
    whole = [_entry(library, model, view) for model in library.scan().values()]
    broken = [
        {"id": model, "downloaded": True, "loaded": False, "error": fault.message}
        for model, fault in library.broken.items()
    ]
    ids = {entry["id"] for entry in (*whole, *broken)}
    partial = [partial_entry(id, size) for id, size in library.partial.items() if id not in ids]
    return [*whole, *broken, *partial]


def catalogue(library: ModelLibrary, view: ClusterView) -> list[dict[str, Any]]:
    """The models that there are cards of, in the same shape."""
    return [_entry(library, model, view) for model in library.catalogue().values()]


def describe(library: ModelLibrary, id: str, view: ClusterView) -> dict[str, Any]:
    """A model's entry with its card and its folder; of one on this disk what its files are.

    Raises ModelNotFound, InvalidCard and InvalidCheckpoint.
    """
    model = library.get(ModelId(id))
    card = model.card.model_dump(exclude={"id", "weight_bytes", "quantization", "variants"})
    folder = None if model.folder is None else str(model.folder)
    variants = [variant.model_dump() for variant in model.card.variants]
    notes = list(library.file_facts(model).notes)
    more = {"folder": folder, "card": card, "variants": variants, "notes": notes}
    files = {} if model.folder is None else {"files": check(model.folder, id)}
    return {**_entry(library, model, view), **more, **files}


def _entry(library: ModelLibrary, model: KnownModel, view: ClusterView) -> dict[str, Any]:
    nodes = [node.name for node in view.nodes] if model.folder else []
    return entry(library, model, library.head(model), fit(model.card, view), nodes)


def entry(
    library: ModelLibrary, model: KnownModel, head: HeadState, fit: Fit, nodes: Sequence[str]
) -> dict[str, Any]:
    """The part of an entry of `GET /v1/models` that placements do not change.

    `nodes`: the names of those that have the files.
    """
    card, files = model.card, library.file_facts(model)
    return {
        "id": card.id,
        "context_length": card.context_length,
        "loaded": False,
        "downloaded": model.folder is not None,
        "nodes": nodes,
        "variant_of": library.original(card.id),
        **facts(card, fit, files),
        "mtp": embedding_words(card) if embeds(card, files) else mtp_words(card, head),
    }
