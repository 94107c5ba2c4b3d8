"""Products of float32 matrices on Linux CPUs, many times as fast as those that MLX brings there.

MLX's wheels for Linux come with the reference BLAS. `cpu_products.c` defines its one function that
MLX calls; it is found in the BLAS's place if it is loaded before MLX is. So `stand_in` is called
before anything imports MLX; until `choose_products` has tried both, MLX's own computes.

Other than most fast ones, this one sums each number in one order, however many rows there are: a
request computes alone what it computes in a batch.
"""

import ctypes
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from ...placement.cluster import OWN
from .cpu_code import CannotStandIn, machine_code, mlx_library

if TYPE_CHECKING:
    import mlx.core as mx

    from .trial import Choice, Run


class Products:
    """The two that may compute: ours, and MLX's."""

    def __init__(self, own: Any, other: Any) -> None:
        self._own = own
        self._other = other
        self.use(own=False)

    def use(self, *, own: bool) -> None:
        """From the next product on."""
        self._own.exo_products_by(None if own else self._other)

    @property
    def computed(self) -> int:
        """Products that ours computed."""
        return int(self._own.exo_products_computed())


_MORE_TRIES: Final = 2
"""Where ours were slower. Other threads of a process that loads compute too, for milliseconds: that
falls on a part of a trial, and two runners that choose differently give different numbers."""
_state: "Products | str" = "the process was started without them"
"""Of this process; why there are none."""


def stand_in() -> None:
    """Puts ours before MLX's. Nothing happens where that cannot be, but that it is remembered."""
    global _state
    try:
        _state = _loaded()
    except CannotStandIn as fault:
        _state = str(fault)


def choose_products(mode: str, clock: Callable[[], float]) -> "Choice":
    """Ours where they are right and no slower; on MLX's thread."""
    from .trial import Choice, choice, pays, try_kernel

    shape = "products of float32 matrices"
    if isinstance(_state, str):
        return Choice(OWN, shape, 1, False, _state)
    if mode == "mlx":
        _state.use(own=False)
        return Choice(OWN, shape, 1, False, "EXO_KERNELS is mlx")
    import mlx.core as mx

    products, before = _state, _state.computed
    ours, stock = _runs(products)
    tried = try_kernel(ours, stock, 1, mx.float32, clock)
    if products.computed == before:
        products.use(own=False)
        return Choice(OWN, shape, 1, False, "MLX does not look for a BLAS here")
    for _ in range(_MORE_TRIES):
        if not tried.fault and not pays([tried]):
            tried = try_kernel(ours, stock, 1, mx.float32, clock)
    used = pays([tried])
    products.use(own=used)
    return choice(OWN, shape, tried, used=used)


def _runs(products: Products) -> "tuple[Run, Run]":
    import mlx.core as mx

    from .trial import FEW, random_rows

    x, weights = (random_rows(s, mx.float32, 6) for s in ((1, FEW, 133), (266, 133)))
    values = random_rows((133, 266), mx.float32, 7)

    def run(own: bool, rows: int) -> "Sequence[mx.array]":
        products.use(own=own)
        made = [x[:, :rows] @ weights.T, x[:, :rows] @ values]
        mx.eval(made)
        return made

    return (lambda rows, _: run(True, rows)), (lambda rows, _: run(False, rows))


def _loaded() -> Products:
    code, library = machine_code(), mlx_library()
    try:
        # From memory: what is loaded is what was checked.
        file = os.memfd_create("exo-products")
        with os.fdopen(file, "wb") as held:
            _ = held.write(code)
            held.flush()
            own: Any = ctypes.CDLL(f"/proc/self/fd/{file}", mode=ctypes.RTLD_GLOBAL)
        # What MLX itself depends on, and not what is looked up first from now on.
        other: Any = ctypes.CDLL(str(library)).cblas_sgemm
    except (OSError, AttributeError) as fault:
        raise CannotStandIn(f"they cannot be loaded: {fault}") from None
    own.exo_products_by.argtypes = [ctypes.c_void_p]
    own.exo_products_by.restype = None
    own.exo_products_computed.restype = ctypes.c_long
    return Products(own, ctypes.cast(other, ctypes.c_void_p))
