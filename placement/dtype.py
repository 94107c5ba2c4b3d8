"""The dtype that a node computes a model in."""

from .card import ModelCard


def resolve_dtype(requested: str, card: ModelCard, backend: str, chip: str) -> str:
    """`auto` is the checkpoint's dtype, but for what the backend cannot run, or runs far slower.

    On CPUs MLX multiplies gathered experts in float32 only, and 4- and 8-bit weights with 16-bit
    scales at a tenth of the speed of float32 scales. The GPUs of M1 and M2 have no bfloat16.
    """
    if requested != "auto":
        return requested
    if backend == "cpu" and (card.num_experts or card.quantization):
        return "float32"
    if card.dtype == "bfloat16" and chip.startswith(("Apple M1", "Apple M2")):
        return "float16"
    return card.dtype
