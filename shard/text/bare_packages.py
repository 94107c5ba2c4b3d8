"""Replaces the `__init__` of mlx_lm and of transformers, which import all of their modules.

mlx_lm's imports MLX and, for seconds, transformers. That of transformers reads every module of
every model, which takes most of a second of CPU time in each generator and each helper, which need
two names. Call these functions before anything imports the packages. Their modules are then
imported one by one as they are named, and are not changed; any other name of transformers imports
the whole of it.
"""

import sys
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import version
from importlib.util import find_spec
from itertools import accumulate
from types import ModuleType
from typing import Any, Final

_NAME: Final = "transformers"
_LOCK: Final = threading.RLock()


@contextmanager
def replaced_modules(stand_ins: Sequence[ModuleType]) -> Generator[None]:
    """Puts stand-ins in the place of modules that are not imported yet; removes them afterwards."""
    absent = {each.__name__: each for each in stand_ins if each.__name__ not in sys.modules}
    sys.modules.update(absent)
    try:
        yield
    finally:
        for name in absent:
            del sys.modules[name]


def _auto_tokenizer() -> Any:
    from transformers.models.auto.tokenization_auto import AutoTokenizer

    return AutoTokenizer


def _fast_tokenizer() -> Any:
    from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast


_HOMES: Final = {"AutoTokenizer": _auto_tokenizer, "PreTrainedTokenizerFast": _fast_tokenizer}
"""Loaders of the names that mlx-lm's tokenizers use. If one fails, the whole is imported."""


class _BarePackage(ModuleType):
    """A package whose `__init__` has not run."""

    def __init__(self, spec: ModuleSpec, homes: Mapping[str, Callable[[], Any]]) -> None:
        super().__init__(spec.name)
        self.__path__ = list(spec.submodule_search_locations or ())
        self.__spec__ = spec
        self.__file__ = spec.origin
        self._homes = homes

    def __getattr__(self, name: str) -> Any:
        if name == "__version__":
            return version(_NAME)
        if name.startswith("__"):  # imports, debuggers and copies look these up in any module
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        try:
            value = self._homes[name]()
        except (KeyError, ImportError):
            return getattr(_real_package(self.__name__), name)
        setattr(self, name, value)
        return value


def bare_package(name: str) -> None:
    """Installs empty packages for a package and those around it, unless they are imported already.

    Raises ImportError if there is none. mlx-vlm's own patch transformers and import what neither a
    tower nor an encoder uses.
    """
    for each in accumulate(name.split("."), "{}.{}".format):
        if each not in sys.modules:
            spec = find_spec(each)
            if spec is None or spec.submodule_search_locations is None:
                raise ImportError(f"there is no {each}")
            package = ModuleType(each)
            package.__path__, package.__spec__ = list(spec.submodule_search_locations), spec
            sys.modules[each] = package


def bare_transformers() -> None:
    """Installs empty packages for transformers, unless it is imported already."""
    if _NAME in sys.modules:
        return
    package = find_spec(_NAME)
    assert package is not None
    models = PathFinder.find_spec(f"{_NAME}.models", package.submodule_search_locations)
    assert models is not None
    sys.modules[_NAME] = _BarePackage(package, _HOMES)
    sys.modules[models.name] = _BarePackage(models, {})
    vars(sys.modules[_NAME])["models"] = sys.modules[models.name]


def _real_package(name: str) -> ModuleType:
    """The real package; modules that were imported before are not imported again."""
    with _LOCK:
        if isinstance(sys.modules[_NAME], _BarePackage):
            for each in (_NAME, f"{_NAME}.models"):
                del sys.modules[each]
        import transformers.models  # noqa: F401  # pyright: ignore[reportUnusedImport]

        return sys.modules[name]
