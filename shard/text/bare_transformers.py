"""Stands in for the `__init__` of transformers, which reads every module of every model it has.

That takes most of a second of a CPU, in each generator and in each helper, to answer two names. As
for mlx-lm, modules are imported one by one; any other name imports the whole of transformers, and
is taken from there. What its tokenizers import of the hub's client to call the hub is left out as
well, a fifth of a second more: a process that reads a tokenizer from a folder calls no hub.
"""

import sys
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import version
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Final, NoReturn

from ...placement.errors import LoadFailed

_NAME: Final = "transformers"
_HUB: Final = tuple(
    f"huggingface_hub.{name}"
    for name in ("hf_api", "repocard", "repocard_data", "_snapshot_download")
)
"""Of which transformers only keeps names for later."""
_LOCK: Final = threading.RLock()


class _Refuses(type):
    """Of a class that nothing can be asked of."""

    def __call__(cls, *_: object, **named: object) -> NoReturn:
        raise LoadFailed("a process that loads a model calls no hub: give it the model's folder")

    def __getattr__(cls, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(f"type object {cls.__name__!r} has no attribute {name!r}")
        return cls()


class _CallsTheHub(metaclass=_Refuses):
    """In the place of a class or function that does."""


class _Hub(ModuleType):
    """A module all of whose names would call the hub."""

    def __getattr__(self, name: str) -> type[_CallsTheHub]:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return _CallsTheHub


@contextmanager
def _without_the_hub() -> Generator[None]:
    """For what is imported meanwhile; any other import finds the real modules."""
    with _LOCK:
        absent = [name for name in _HUB if name not in sys.modules]
        sys.modules.update((name, _Hub(name)) for name in absent)
        try:
            yield
        finally:
            for name in absent:
                del sys.modules[name]


def _auto_tokenizer() -> Any:
    with _without_the_hub():
        from transformers.models.auto.tokenization_auto import AutoTokenizer

    return AutoTokenizer


def _fast_tokenizer() -> Any:
    with _without_the_hub():
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
