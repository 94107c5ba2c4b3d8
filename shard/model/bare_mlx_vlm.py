"""Empty packages around the modules of mlx-vlm: its own patch transformers and import what neither
a tower nor an encoder uses."""

import sys
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Any


def bare_mlx_vlm(family: str) -> None:
    """Installs empty packages for mlx-vlm and one family in it, unless they are imported.

    Raises ImportError.
    """
    path: Any = None
    for name in ("mlx_vlm", "mlx_vlm.models", f"mlx_vlm.models.{family}"):
        if name not in sys.modules:
            spec = PathFinder.find_spec(name, path)
            if spec is None or spec.submodule_search_locations is None:
                raise ImportError(f"there is no {name}")
            package = ModuleType(name)
            package.__path__, package.__spec__ = list(spec.submodule_search_locations), spec
            sys.modules[name] = package
        path = sys.modules[name].__path__
