"""Stands in for the `__init__` of transformers, which reads every module of every model it has.

That takes most of a second of a CPU, in each generator and in each helper, to answer two names. As
for mlx-lm, modules are imported one by one; any other name imports the whole of transformers, and
is taken from there.
"""

import sys
import threading
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import version
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Final

_NAME: Final = "transformers"
_LOCK: Final = threading.RLock()


def _auto_tokenizer() -> Any:
    from transformers.models.auto.tokenization_auto import AutoTokenizer

    return AutoTokenizer


def _fast_tokenizer() -> Any:
    from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast


_HOMES: Final = {"AutoTokenizer": _auto_tokenizer, "PreTrainedTokenizerFast": _fast_tokenizer}
"""What mlx-lm's tokenizers name; in a release that has them elsewhere the whole is imported."""


class _Bare(ModuleType):
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
        if name.startswith("__"):  # as an import, a debugger and a copy ask any module
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        try:
            found = self._homes[name]()
        except (KeyError, ImportError):
            return getattr(_whole(self.__name__), name)
        setattr(self, name, found)
        return found


def bare_transformers() -> None:
    """Does nothing where transformers is there already."""
    if _NAME in sys.modules:
        return
    package = find_spec(_NAME)
    assert package is not None
    models = PathFinder.find_spec(f"{_NAME}.models", package.submodule_search_locations)
    assert models is not None
    sys.modules[_NAME] = _Bare(package, _HOMES)
    sys.modules[models.name] = _Bare(models, {})
    vars(sys.modules[_NAME])["models"] = sys.modules[models.name]


def _whole(name: str) -> ModuleType:
    """The package itself; what was imported of it before is not imported again."""
    with _LOCK:
        if isinstance(sys.modules[_NAME], _Bare):
            for each in (_NAME, f"{_NAME}.models"):
                del sys.modules[each]
        import transformers.models  # noqa: F401  # pyright: ignore[reportUnusedImport]

        return sys.modules[name]
