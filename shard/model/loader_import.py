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
from types import ModuleType
from typing import Any, NoReturn

from ...placement.errors import LoadFailed
from ..kernels.cpu_products import stand_in
from ..text.bare_packages import bare_package, bare_transformers, replaced_modules


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


def _stand_in_for(name: str) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(_STAND_INS[name])
    return module


stand_in()
_SET = resource.setrlimit
resource.setrlimit = _raise_soft_limit
bare_package("mlx_lm")
bare_transformers()
try:
    with replaced_modules([_stand_in_for(name) for name in _STAND_INS]):
        import mlx_lm.utils  # noqa: F401  # pyright: ignore[reportUnusedImport]
finally:
    resource.setrlimit = _SET
