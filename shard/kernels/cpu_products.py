"""Products of float32 matrices on Linux CPUs, many times as fast as those in MLX's wheels.

MLX's wheels for Linux contain the reference BLAS. `cpu_products.c` defines the one function of it
that MLX calls, and the linker takes ours if it is loaded before MLX is. So `stand_in` is called
before anything imports MLX. MLX's own function computes until `choose_products` has tried both.

Unlike most fast BLAS libraries, this one sums each number in one order for any number of rows: a
request computes the same bits alone and in a batch.
"""

import ctypes
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from ...placement.cluster import OWN
from .cpu_code import CannotStandIn, machine_code, mlx_library

if TYPE_CHECKING:
    import mlx.core as mx

    from .trial import KernelChoice, Run


class Products:
    """Switches between our products and MLX's."""

    def __init__(self, own: Any, other: Any) -> None:
        self._own = own
        self._other = other
        self.use(own=False)

    def use(self, *, own: bool) -> None:
        """Selects our products or MLX's from the next product on."""
        self._own.exo_products_by(None if own else self._other)

    @property
    def computed(self) -> int:
        """The number of products that our code has computed."""
        return int(self._own.exo_products_computed())


_MORE_TRIES: Final = 2
"""Further trials if ours were slower. Other threads of a loading process compute for milliseconds,
which slows a part of a trial, and runners that choose differently give different numbers."""
_state: "Products | str" = "the process was started without them"
"""The products of this process, or the reason why there are none."""


def stand_in() -> None:
    """Loads our products in front of MLX's, or notes the reason why that is impossible."""
    global _state
    try:
        _state = _load()
    except CannotStandIn as fault:
        _state = str(fault)


def choose_products(mode: str, clock: Callable[[], float]) -> "KernelChoice":
    """Chooses our products if they are right and no slower. Runs on MLX's thread."""
    from .trial import KernelChoice, choice, pays, try_kernel

    shape = "products of float32 matrices"
    if isinstance(_state, str):
        return KernelChoice(OWN, shape, 1, False, _state)
    if mode == "mlx":
        _state.use(own=False)
        return KernelChoice(OWN, shape, 1, False, "EXO_KERNELS is mlx")
    import mlx.core as mx

    products, count_before = _state, _state.computed
    ours, stock = _runs(products)
    trial = try_kernel(ours, stock, 1, mx.float32, clock)
    if products.computed == count_before:
        products.use(own=False)
        return KernelChoice(OWN, shape, 1, False, "MLX does not look for a BLAS here")
    for _ in range(_MORE_TRIES):
        if not trial.fault and not pays([trial]):
            trial = try_kernel(ours, stock, 1, mx.float32, clock)
    used = pays([trial])
    products.use(own=used)
    return choice(OWN, shape, trial, used=used)


def _runs(products: Products) -> "tuple[Run, Run]":
    import mlx.core as mx

    from .trial import FEW, random_rows

    x, weights = (random_rows(s, mx.float32, 6) for s in ((1, FEW, 133), (266, 133)))
    values = random_rows((133, 266), mx.float32, 7)

    def run(own: bool, rows: int) -> "Sequence[mx.array]":
        products.use(own=own)
        results = [x[:, :rows] @ weights.T, x[:, :rows] @ values]
        mx.eval(results)
        return results

    return (lambda rows, _: run(True, rows)), (lambda rows, _: run(False, rows))


def _load() -> Products:
    code, library = machine_code(), mlx_library()
    try:
        # From memory: the loaded code is the checked code.
        file = os.memfd_create("exo-products")
        with os.fdopen(file, "wb") as library_file:
            _ = library_file.write(code)
            library_file.flush()
            own: Any = ctypes.CDLL(f"/proc/self/fd/{file}", mode=ctypes.RTLD_GLOBAL)
        # MLX's own dependency, and not the library that is looked up first from now on.
        other: Any = ctypes.CDLL(str(library)).cblas_sgemm
    except (OSError, AttributeError) as fault:
        raise CannotStandIn(f"they cannot be loaded: {fault}") from None
    own.exo_products_by.argtypes = [ctypes.c_void_p]
    own.exo_products_by.restype = None
    own.exo_products_computed.restype = ctypes.c_long
    return Products(own, ctypes.cast(other, ctypes.c_void_p))
