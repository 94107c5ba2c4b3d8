"""The call formats that this node reads, by name, and the marks that begin their calls."""

from typing import Final

from .call_scanners import Declared, Scanner
from .object_calls import ObjectScanner
from .object_formats import (
    DEEPSEEK,
    DEEPSEEK_MARKS,
    GEMMA_4,
    GEMMA_FUNCTION,
    HARMONY,
    HERMES,
    KIMI_K2,
    MISTRAL,
    PLAIN,
    PYTHONIC,
    Objects,
)
from .tagged_calls import (
    DSML,
    DSML_MARK,
    GLM,
    KIMI_K3,
    LONGCAT,
    MINICPM,
    MINIMAX,
    MUSE,
    QWEN,
    SEED,
    TaggedScanner,
    Tags,
)

FORMATS: Final[dict[str, Tags | Objects]] = {
    "json_tools": HERMES,
    "qwen3_coder": QWEN,
    "glm47": GLM,
    "laguna": GLM,
    "longcat": LONGCAT,
    "minimax_m2": MINIMAX,
    "muse_spark": MUSE,
    "minicpm5": MINICPM,
    "kimi_k2": KIMI_K2,
    "kimi_k3": KIMI_K3,
    "mistral": MISTRAL,
    "gemma4": GEMMA_4,
    "function_gemma": GEMMA_FUNCTION,
    "pythonic": PYTHONIC,
    "DeepSeek": DEEPSEEK,
    "Harmony": HARMONY,
    "DSML": DSML,
    "Seed": SEED,
    "": PLAIN,
}
"""Formats by mlx-lm's names, and by ours where it has none."""
OWN_MARKS: Final[dict[str, tuple[str, ...]]] = {
    "DeepSeek": DEEPSEEK_MARKS[:1],
    "DSML": (f"<{DSML_MARK}function_calls>", f"<{DSML_MARK}tool_calls>"),
    "Seed": ("<seed:tool_call>",),
}
"""The marks that begin calls in formats that mlx-lm does not have."""
BARE_MARKS: Final = {"qwen3_coder": "<function=", "Seed": "<function="}
"""How a call begins where a model forgets the mark before it."""


def scanner_for(call_format: str, declared: Declared, *, splits: bool = False) -> Scanner:
    """The scanner of one section of calls, which is fed from the mark on that begins it.

    `splits`: see `TaggedScanner`.
    """
    match FORMATS.get(call_format, PLAIN):
        case Tags() as tags:
            return TaggedScanner(tags, declared, splits=splits)
        case Objects() as objects:
            return ObjectScanner(objects, declared)
