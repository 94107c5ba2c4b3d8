"""Stands in for mlx_lm's `__init__`, which imports all of it: MLX, and transformers by seconds.

To be called before anything imports mlx_lm; its modules are then imported one by one, as they are
named. Nothing of the modules themselves is changed.
"""

import sys
from importlib.util import find_spec
from types import ModuleType


def bare_mlx_lm() -> None:
    """Does nothing where mlx_lm is there already."""
    if "mlx_lm" in sys.modules:
        return
    found = find_spec("mlx_lm")
    assert found is not None and found.submodule_search_locations is not None
    package = ModuleType("mlx_lm")
    package.__path__ = list(found.submodule_search_locations)
    package.__spec__ = found
    sys.modules["mlx_lm"] = package
