"""Products of float32 matrices on Linux CPUs, many times as fast as those that MLX brings there.

MLX's wheels for Linux come with the reference BLAS. `cpu_products.c` defines its one function that
MLX calls; it is found in the BLAS's place if it is loaded before MLX is. So `stand_in` is called
before anything imports MLX; until `choose_products` has tried both, MLX's own computes.

Other than most fast ones, this one sums each number in one order, however many rows there are: a
request computes alone what it computes in a batch.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ...mtp.kernels.kept_code import keep, kept, private_folder

if TYPE_CHECKING:
    import mlx.core as mx

    from ...mtp.kernels.trial import Choice, Run

_TEXT: Final = Path(__file__).with_suffix(".c")
_OPTIONS: Final = (
    *("-x", "c", "-std=gnu11", "-O2", "-shared", "-fPIC"),
    *("-mavx2", "-mfma", "-ffp-contract=fast", "-fno-math-errno"),
)
_COMPILERS: Final = ("gcc", "g++", "cc", "clang")
_SECONDS: Final = 60
_NAME: Final = "cpu_product"


class CannotStandIn(RuntimeError):
    """Why MLX's own products compute."""


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
    from ...mtp.kernels.trial import Choice, choice, pays, try_kernel

    shape = "products of float32 matrices"
    if isinstance(_state, str):
        return Choice(_NAME, shape, 1, False, _state)
    if mode == "mlx":
        _state.use(own=False)
        return Choice(_NAME, shape, 1, False, "EXO_KERNELS is mlx")
    import mlx.core as mx

    products, before = _state, _state.computed
    ours, stock = _runs(products)
    tried = try_kernel(ours, stock, 1, mx.float32, clock)
    if products.computed == before:
        products.use(own=False)
        return Choice(_NAME, shape, 1, False, "MLX does not look for a BLAS here")
    used = pays([tried])
    products.use(own=used)
    return choice(_NAME, shape, tried, used=used)


def _runs(products: Products) -> "tuple[Run, Run]":
    import mlx.core as mx

    from ...mtp.kernels.trial import FEW, random_rows

    x, weights = (random_rows(s, mx.float32, 6) for s in ((1, FEW, 133), (266, 133)))
    values = random_rows((133, 266), mx.float32, 7)

    def run(own: bool, rows: int) -> "Sequence[mx.array]":
        products.use(own=own)
        made = [x[:, :rows] @ weights.T, x[:, :rows] @ values]
        mx.eval(made)
        return made

    return (lambda rows, _: run(True, rows)), (lambda rows, _: run(False, rows))


def _loaded() -> Products:
    code = machine_code()
    mlx = find_spec("mlx")
    homes = mlx.submodule_search_locations if mlx is not None else None
    library = Path(next(iter(homes or [""]))) / "lib" / "libmlx.so"
    if not library.exists():
        raise CannotStandIn("MLX is built in another way here")
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


def _require_cpu() -> None:
    """Raises CannotStandIn where the text is for another machine."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        raise CannotStandIn("they are written for Linux on x86-64")
    try:
        told = Path("/proc/cpuinfo").read_text().split("\nflags", 1)[1].split("\n", 1)[0].split()
    except (OSError, IndexError):
        raise CannotStandIn("this CPU does not tell what it can do") from None
    if not {"avx2", "fma"} <= set(told):
        raise CannotStandIn("this CPU has no AVX2")


def machine_code() -> bytes:
    """A shared library; compiled once a machine. Raises CannotStandIn."""
    _require_cpu()
    text = _TEXT.read_bytes()
    compiler = next((found for name in _COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        raise CannotStandIn("there is no C compiler: install gcc, and load the model again")
    key = hashlib.sha256(text + " ".join(_OPTIONS).encode()).hexdigest()
    folder = private_folder()
    path = folder / f"{key}.so" if folder else None
    if path and (held := kept(path)):
        return held
    code = _compiled(compiler, text)
    if path:
        keep(path, code)
    return code


def _compiled(compiler: str, text: bytes) -> bytes:
    with tempfile.TemporaryDirectory(prefix="exo-node-products-") as scratch:
        out = Path(scratch) / "products.so"
        command = [compiler, *_OPTIONS, "-o", str(out), "-"]
        try:
            _ = subprocess.run(
                command, input=text, capture_output=True, timeout=_SECONDS, check=True
            )
            return out.read_bytes()
        except subprocess.CalledProcessError as fault:
            said = [line for line in fault.stderr.decode(errors="replace").splitlines() if line]
            wrong = next((line for line in said if "error" in line), said[0] if said else "")
            raise CannotStandIn(f"{compiler} refuses them: {wrong[:200]}") from None
        except (OSError, subprocess.TimeoutExpired) as fault:
            raise CannotStandIn(f"{compiler} does not run: {type(fault).__name__}") from None
