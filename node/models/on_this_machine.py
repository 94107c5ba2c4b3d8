"""The lists of models as this machine alone has them: for commands that need no running node."""

from collections.abc import Sequence
from typing import Any

from ...placement.cluster import ClusterView
from ...placement.drafting import HeadState
from ...placement.errors import ExoNodeError
from ...placement.fitting import fit
from ...placement.ids import ModelId
from ...placement.library import not_here
from .entries import facts, mtp_words, part_entry
from .library import KnownModel, ModelLibrary


def on_disk(library: ModelLibrary, view: ClusterView) -> list[dict[str, Any]]:
    """The models on this disk in the shape of `GET /v1/models`. Blocks."""
    known = [_entry(library, model, view) for model in library.scan().values()]
    broken = [
        {"id": model, "downloaded": True, "loaded": False, "error": fault.message}
        for model, fault in library.broken.items()
    ]
    listed = {entry["id"] for entry in (*known, *broken)}
    begun = [part_entry(part) for id, part in library.parts().items() if id not in listed]
    return [*known, *broken, *begun]


def catalogue(library: ModelLibrary, view: ClusterView) -> list[dict[str, Any]]:
    """The models that there are cards of, in the same shape. Blocks."""
    return [_entry(library, model, view) for model in library.catalogue().values()]


def one(library: ModelLibrary, id: str, view: ClusterView) -> dict[str, Any]:
    """All that is known of a model: its entry, its card, where it lies. Blocks.

    Raises ModelNotFound, InvalidCard and InvalidCheckpoint.
    """
    known = library.get(ModelId(id))
    card = known.card.model_dump(exclude={"id", "weight_bytes", "quantization", "variants"})
    folder = None if known.folder is None else str(known.folder)
    variants = [variant.model_dump() for variant in known.card.variants]
    return {**_entry(library, known, view), "folder": folder, "card": card, "variants": variants}


def _entry(library: ModelLibrary, known: KnownModel, view: ClusterView) -> dict[str, Any]:
    card = known.card
    names: Sequence[str] = [node.name for node in view.nodes] if known.folder else []
    return {
        "id": card.id,
        "context_length": card.context_length,
        "loaded": False,
        "downloaded": known.folder is not None,
        "nodes": names,
        "variant_of": library.original(card.id),
        **facts(card, fit(card, view), library.file_facts(known)),
        "mtp": mtp_words(card, _head(library, known)),
    }


def _head(library: ModelLibrary, known: KnownModel) -> HeadState:
    if known.folder is None:
        return HeadState(False, not_here(known.card.id))
    try:
        return library.head(known)
    except ExoNodeError as fault:
        return HeadState(False, fault.message)
