"""Replaces mlx_lm's `__init__`, which imports MLX and, for seconds, transformers.

Call it before anything imports mlx_lm. Its modules are then imported one by one as they are named;
the modules themselves are not changed.
"""

import sys
from importlib.util import find_spec
from types import ModuleType


def bare_mlx_lm() -> None:
    """Installs an empty package for mlx_lm, unless it is imported already."""
    if "mlx_lm" in sys.modules:
        return
    spec = find_spec("mlx_lm")
    assert spec is not None and spec.submodule_search_locations is not None
    package = ModuleType("mlx_lm")
    package.__path__ = list(spec.submodule_search_locations)
    package.__spec__ = spec
    sys.modules["mlx_lm"] = package
