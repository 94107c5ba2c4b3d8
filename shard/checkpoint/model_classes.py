"""The model types that there are classes of: mlx-lm's by its files, none of which is imported, and
encoders'."""

import ast
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from .embedders import is_encoder
from .python_source import statements


def has_class(config: Mapping[str, Any]) -> bool:
    """Whether the model of this config.json can be run, as far as its type shows."""
    kind: object = config.get("model_type")
    if not isinstance(kind, str):
        return False
    if is_encoder(config):
        return "ForSequenceClassification" not in str(config.get("architectures"))  # a reranker
    # Text-only exports name a type that mlx-lm knows under the multimodal model's name.
    names = (kind, kind.removesuffix("_text"))
    return any(_remapped().get(name, name) in _classes() for name in names)


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
