"""MLX and mlx-lm in the tests' processes as a runner has them. To be imported before either.

On Linux MLX's own products of float32 matrices take most of a tiny model's time. Runners compute
them by ours, and so do these processes, from the first one on. One trial settles it for a whole
process: two engines of one test are not to differ because the machine was busy between them.
"""

import time
from collections.abc import Callable

from exo_node.shard.model import loader_import  # noqa: F401  # pyright: ignore[reportUnusedImport]

# What it does has to come before MLX is imported.
# isort: split
from exo_node.shard.kernels import cpu_products, install
from exo_node.shard.kernels.trial import KernelChoice

_products = cpu_products._state  # pyright: ignore[reportPrivateUsage]
_try = cpu_products.choose_products
_tried = _try("auto", time.process_time)


def _choose(mode: str, clock: Callable[[], float]) -> KernelChoice:
    if mode != "auto":
        return _try(mode, clock)
    if isinstance(_products, cpu_products.Products):
        _products.use(own=_tried.used)
    return _tried


install.choose_products = _choose
