"""Machine code of `cpu_products.c`, and whether this machine can use it. Free of MLX.

The node checks that before it plans; the runner loads the code.
"""

import hashlib
import logging
import platform
import shutil
import subprocess
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from ...placement.cluster import OWN
from .code_store import load_code, private_folder, store_code

log = logging.getLogger(__name__)

_TEXT: Final = Path(__file__).with_name("cpu_products.c")
_OPTIONS: Final = (
    *("-x", "c", "-std=gnu11", "-O2", "-shared", "-fPIC"),
    *("-mavx2", "-mfma", "-ffp-contract=fast", "-fno-math-errno"),
)
_COMPILERS: Final = ("gcc", "g++", "cc", "clang")
_SECONDS: Final = 60


class CannotStandIn(RuntimeError):
    """Our products cannot replace MLX's; the message is the reason."""


def own_products() -> str:
    """OWN if a runner on this machine's CPU will try our products, else the reason why not."""
    try:
        _ = machine_code()
        _ = mlx_library()
    except CannotStandIn as fault:
        return str(fault)
    return OWN


def mlx_library() -> Path:
    """MLX's shared library, which ours replaces. Raises CannotStandIn."""
    mlx = find_spec("mlx")
    homes = mlx.submodule_search_locations if mlx is not None else None
    candidates = (Path(home) / "lib" / "libmlx.so" for home in homes or ())
    library = next((path for path in candidates if path.exists()), None)
    if library is None:
        raise CannotStandIn("MLX is built in another way here")
    return library


def machine_code() -> bytes:
    """The shared library of our products, compiled once per machine. Raises CannotStandIn."""
    _require_cpu()
    text = _TEXT.read_bytes()
    compiler = next((path for name in _COMPILERS if (path := shutil.which(name))), None)
    if compiler is None:
        raise CannotStandIn("there is no C compiler: install gcc, and start the node again")
    key = hashlib.sha256(text + " ".join(_OPTIONS).encode()).hexdigest()
    folder = private_folder("kernels")
    path = folder / f"{key}.so" if folder else None
    if path and (code_on_disk := load_code(path)):
        return code_on_disk
    log.info("compiling products for this CPU with %s, once for this machine", compiler)
    code = compile_library(compiler, text)
    if path:
        store_code(path, code)
    return code


def _require_cpu() -> None:
    """Raises CannotStandIn unless this is Linux on an x86-64 CPU with AVX2 and FMA."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        raise CannotStandIn("they are written for Linux on x86-64")
    try:
        flags = Path("/proc/cpuinfo").read_text().split("\nflags", 1)[1].split("\n", 1)[0].split()
    except (OSError, IndexError):
        raise CannotStandIn("this CPU does not tell what it can do") from None
    if not {"avx2", "fma"} <= set(flags):
        raise CannotStandIn("this CPU has no AVX2")


def compile_library(compiler: str, text: bytes) -> bytes:
    """The shared library that `compiler` makes of the C source `text`. Raises CannotStandIn."""
    with tempfile.TemporaryDirectory(prefix="exo-node-products-") as scratch:
        out = Path(scratch) / "products.so"
        command = [compiler, *_OPTIONS, "-o", str(out), "-"]
        try:
            _ = subprocess.run(
                command, input=text, capture_output=True, timeout=_SECONDS, check=True
            )
            return out.read_bytes()
        except subprocess.CalledProcessError as fault:
            messages = [line for line in fault.stderr.decode(errors="replace").splitlines() if line]
            wrong = next(
                (line for line in messages if "error" in line), messages[0] if messages else ""
            )
            raise CannotStandIn(f"{compiler} refuses them: {wrong[:200]}") from None
        except (OSError, subprocess.TimeoutExpired) as fault:
            raise CannotStandIn(f"{compiler} does not run: {type(fault).__name__}") from None
