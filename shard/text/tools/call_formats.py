"""The call formats that this node reads, by name, and the marks that begin their calls."""

from typing import Final

from . import object_formats as objects
from . import tagged_calls as tagged
from .call_scanners import Declared, Scanner
from .object_calls import ObjectScanner
from .tagged_calls import TaggedScanner, Tags

FORMATS: Final[dict[str, Tags | objects.Objects]] = {
    "json_tools": objects.HERMES,
    "qwen3_coder": tagged.QWEN,
    "glm47": tagged.GLM,
    "laguna": tagged.GLM,
    "longcat": tagged.LONGCAT,
    "minimax_m2": tagged.MINIMAX,
    "muse_spark": tagged.MUSE,
    "minicpm5": tagged.MINICPM,
    "kimi_k2": objects.KIMI_K2,
    "kimi_k3": tagged.KIMI_K3,
    "mistral": objects.MISTRAL,
    "gemma4": objects.GEMMA_4,
    "function_gemma": objects.GEMMA_FUNCTION,
    "pythonic": objects.PYTHONIC,
    "DeepSeek": objects.DEEPSEEK,
    "Harmony": objects.HARMONY,
    "DSML": tagged.DSML,
    "Seed": tagged.SEED,
    "": objects.PLAIN,
}
"""Formats by mlx-lm's names, and by ours where it has none."""
OWN_MARKS: Final[dict[str, tuple[str, ...]]] = {
    "DeepSeek": objects.DEEPSEEK_MARKS[:1],
    "DSML": (f"<{tagged.DSML_MARK}function_calls>", f"<{tagged.DSML_MARK}tool_calls>"),
    "Seed": ("<seed:tool_call>",),
}
"""The marks that begin calls in formats that mlx-lm does not have."""
BARE_MARKS: Final = {"qwen3_coder": "<function=", "Seed": "<function="}
"""How a call begins where a model forgets the mark before it."""


def scanner_for(call_format: str, declared: Declared, *, splits: bool = False) -> Scanner:
    """The scanner of one section of calls, which is fed from the mark on that begins it.

    `splits`: see `TaggedScanner`.
    """
    form = FORMATS.get(call_format, objects.PLAIN)
    if isinstance(form, Tags):
        return TaggedScanner(form, declared, splits=splits)
    return ObjectScanner(form, declared)
