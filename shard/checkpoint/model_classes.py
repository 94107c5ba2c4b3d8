"""The model types that there are classes of: mlx-lm's by its files, none of which is imported,
encoders', and those that are made of mlx-vlm's modules."""

import ast
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, cast

from .checkpoint import Checkpoint
from .embedders import is_encoder
from .python_source import statements

FROM_VLM: Final = {
    name.replace("_", ""): name
    for name in ("qwen4_exp", "cohere2_moe", "flint", "k2_horizon", "kolibri1", "step3p7")
}
"""mlx-vlm's modules of model types that mlx-lm lacks, by the types without `_`."""
_POOLED: Final = "it keeps pooled keys, whose rows cannot be taken back"
_BESIDE: Final = "its layers keep recurrent states beside keys and values"
_PLACES: Final = "it finds the positions of its rows by itself"
_NOT_BROUGHT_IN: Final = {
    **dict.fromkeys(("deepseek_v4", "glm5_next"), _POOLED),
    **dict.fromkeys(("inkling", "zaya1_vl"), _BESIDE),
    **dict.fromkeys(("glm4v", "glm4v_moe", "ernie4_5_moe_vl", "qwen3_omni_moe"), _PLACES),
    "hy_v4": "its layers share the keys that one of them chooses",
}
"""Why other classes of mlx-vlm are not used."""
TABLE: Final = ".ngram_embedding.shard"
"""Part of the names of their tables' tensors."""


def has_class(config: Mapping[str, Any]) -> bool:
    """Whether the model of this config.json can be run, as far as its type shows."""
    kind: object = config.get("model_type")
    if not isinstance(kind, str):
        return False
    if is_encoder(config):
        return "ForSequenceClassification" not in str(config.get("architectures"))  # a reranker
    # Text-only exports name a type that mlx-lm knows under the multimodal model's name.
    names = (kind, kind.removesuffix("_text"))
    return vlm_type(config) is not None or any(
        _remapped().get(name, name) in _classes() for name in names
    )


def vlm_type(config: Mapping[str, Any]) -> str | None:
    """The type of a model whose class is made of mlx-vlm's modules, or None for another model."""
    kind = str(config.get("model_type")).removesuffix("_text").replace("_", "")
    name = FROM_VLM.get(kind)
    return None if name in _classes() else name


def lacking(config: Mapping[str, Any]) -> str:
    """Why a model without a class is not run, for a person."""
    kind = config.get("model_type")
    why = _NOT_BROUGHT_IN.get(str(kind), "")
    theirs = f" (mlx-vlm has one, which is not used here: {why})" if why else ""
    return f"mlx-lm has no class for model_type {str(kind)[:80]!r}{theirs}"


def mapped_bytes(checkpoint: Checkpoint) -> int:
    """Bytes of the tables whose rows are read from their files as they are needed."""
    if vlm_type(checkpoint.config) is None:
        return 0
    return sum(t.nbytes for t in checkpoint.tensors.values() if TABLE in t.name)


@cache
def _package() -> Path | None:
    spec = find_spec("mlx_lm")
    folders = spec.submodule_search_locations if spec else None
    return Path(folders[0]) if folders else None


@cache
def _classes() -> frozenset[str]:
    folder = _package()
    if folder is None:
        return frozenset()
    files = (*folder.glob("models/*.py"), *folder.glob("models/*/__init__.py"))
    return frozenset(f.parent.name if f.stem == "__init__" else f.stem for f in files)


@cache
def _remapped() -> Mapping[str, str]:
    """`mlx_lm.utils.MODEL_REMAPPING`, a table of strings in its source."""
    folder = _package()
    if folder is None:
        return {}
    for node in statements((folder / "utils.py").read_text()):
        match node:
            case ast.Assign(targets=[ast.Name(id="MODEL_REMAPPING")], value=value):
                return cast("Mapping[str, str]", ast.literal_eval(value))
            case _:
                pass
    return {}
