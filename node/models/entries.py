"""One model as lists of models show it: size, format, whether it fits, its MTP state in words."""

from typing import Any

from ...placement.card import ModelCard
from ...placement.drafting import HeadState
from ...placement.fitting import Fit
from .file_facts import FileFacts
from .places import Part


def facts(card: ModelCard, fit: Fit, files: FileFacts) -> dict[str, Any]:
    """The part of an entry of `GET /v1/models` that the card, the files and the nodes decide."""
    return {
        "size_bytes": card.weight_bytes,
        "quantization": card.quantization,
        "format": format_of(card),
        "drafts": card.native_mtp is not None,
        "parameters": parameters(card.weight_bytes, card.quantization, format_of(card)),
        "model_type": card.model_type,
        "capabilities": list(files.capabilities),
        "digest": files.digest or None,
        "fits": {
            "nodes": fit.nodes,
            "needed_bytes": fit.needed_bytes,
            "context_length": fit.context or None,
            "tokens_per_second": round(1 / fit.seconds, 1) if fit.seconds else None,
            "reason": fit.reason or None,
            "dtype": fit.dtype or None,
            "dtype_reason": fit.dtype_reason or None,
        },
    }


def parameters(weight_bytes: int, bits: int | None, format: str) -> int:
    """Parameters, estimated from the size: a quantised one has half a bit of scale and bias."""
    each = (bits + 0.5) / 8 if bits else {"float32": 4, "FP8": 1}.get(format, 2)
    return round(weight_bytes / each)


def part_entry(part: Part) -> dict[str, Any]:
    """The entry of a model that is here in part and whole on no node that is reached."""
    return {
        "id": part.id,
        "loaded": False,
        "downloaded": False,
        "size_bytes": part.nbytes,
        "partial_bytes": part.nbytes,
        "error": f"only a part of it is here, copied from another node: a load goes on with it "
        f"while that node runs, and `exo-node models rm {part.id}` deletes it",
    }


def format_of(card: ModelCard) -> str:
    """How the weights are stored, for a person: `4-bit`, `FP8` or the name of a float."""
    if card.quantization is not None:
        return f"{card.quantization}-bit"
    return "FP8" if card.fp8 else card.dtype


def mtp_words(card: ModelCard, head: HeadState) -> str:
    """Whether the model can draft for itself, before switches and placements are asked."""
    if head.loaded and card.native_mtp is not None:
        mtp = card.native_mtp
        return f"head found; drafts {mtp.default_k} a round, at most {mtp.max_k}"
    return head.reason or "no head"
