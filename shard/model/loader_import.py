"""Imports mlx-lm's loader, `mlx_lm.utils`, as a runner needs it.

Import it before any module that imports MLX or mlx-lm: our products
(`shard/kernels/cpu_products.py`) must be loaded before MLX, and an import of mlx-lm does two things
that are changed here:

- It sets a hard limit of 4096 open files. A process may lower its hard limit and not raise it, so
  where it is below 4096 already the import fails, and with it every load.
- It imports transformers and the hub's client, for tokenizers and downloads. They take half a
  second of a CPU, and only a generator needs them: its codec imports them.
"""

import resource
import sys
from collections.abc import Generator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NoReturn

from ...placement.errors import LoadFailed
from ..kernels.cpu_products import stand_in
from ..text.bare_mlx_lm import bare_mlx_lm
from ..text.bare_transformers import bare_transformers


def _raise_soft_limit(resource_id: int, limits: tuple[int, int]) -> None:
    """Raises the soft limit as far as the hard one allows, and lowers neither."""
    soft, hard = resource.getrlimit(resource_id)
    target = limits[0] if hard == resource.RLIM_INFINITY else min(limits[0], hard)
    if soft != resource.RLIM_INFINITY and soft < target:
        _SET(resource_id, (target, hard))


def _load_tokenizer(*args: Any, **kwargs: Any) -> Any:
    from mlx_lm.tokenizer_utils import load

    return load(*args, **kwargs)


def _download(*_: object, **named: object) -> NoReturn:
    raise LoadFailed("a process that loads a model downloads nothing: give it the model's folder")


_STAND_INS = {
    "mlx_lm.tokenizer_utils": {"TokenizerWrapper": object, "load": _load_tokenizer},
    "huggingface_hub": {"snapshot_download": _download},
}
"""The names that `mlx_lm.utils` imports from modules that are left out."""


@contextmanager
def _without_modules() -> Generator[None]:
    """Replaces the modules by stand-ins meanwhile; a later import loads the real ones."""
    absent = [name for name in _STAND_INS if name not in sys.modules]
    for name in absent:
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(_STAND_INS[name])
    try:
        yield
    finally:
        for name in absent:
            del sys.modules[name]


stand_in()
_SET = resource.setrlimit
resource.setrlimit = _raise_soft_limit
bare_mlx_lm()
bare_transformers()
try:
    with _without_modules():
        import mlx_lm.utils  # noqa: F401  # pyright: ignore[reportUnusedImport]
finally:
    resource.setrlimit = _SET
