"""Fuses operations on a CPU, by a compiler that MLX can use, and lets no answer wait for it.

On a CPU `mx.compile` writes C++ and calls `g++` on it, half a second for each function. The source
starts with the preprocessed headers of the compiler that built MLX, which another compiler may
reject: g++ 13 rejects those of MLX 0.32.4 (it declares `_Float32` by itself), and then every model
of mlx-lm fails at its first forward. So a small function is compiled first.
"""

import contextlib
import hashlib
import logging
import os
import platform
import shutil
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final

import mlx.core as mx

from ...mtp.caches.rollback import cache_arrays
from ..kernels.fused_code import COMPILING, note
from .layer_probe import random_rows
from .open_model import MODEL_FAULTS, headline
from .stage_limits import StageLimits
from .stage_model import StageModel
from .tensors import DTYPES

log = logging.getLogger(__name__)

OTHERS: Final = ("g++-12", "g++-11", "clang++", *(f"clang++-{n}" for n in range(20, 13, -1)))
"""Compilers to try if `g++` fails, by the names of their packages."""
OTHER_BITS: Final = "fused functions have other bits on this CPU than single operations"
STEP_BACK: Final = 5
"""How much lower the priority of compilers is that run beside answers."""
_ROWS: Final = (9, 1, 3)
"""Rows of the forwards that are compiled: a prompt's, a token's, a verify's."""
_Trials = Sequence[tuple[Path, mx.array]]
"""Compilers, and for each the result of a function that none has compiled but it."""

_links: "list[tempfile.TemporaryDirectory[str]]" = []
"""Folders in PATH, removed at the end of the process."""


def may_begin_unfused() -> bool:
    """Whether answers may begin before operations are fused, which then must not change bits.

    The compilers of other CPUs than x86-64 may round a product and a sum together.
    """
    on_cpu = mx.default_device() == mx.Device(mx.cpu)
    return on_cpu and (sys.platform, platform.machine()) == ("linux", "x86_64")


def prepare_fusing() -> None:
    """Makes `mx.compile` work on a CPU, or turns it off with a warning.

    Without it each operation runs by itself, with the same results. Runs on MLX's thread.
    """
    if mx.default_device() == mx.Device(mx.cpu) and (fault := _choose(_trials())):
        _do_without(fault)


class LaterFusing:
    """Has MLX compile a stage's functions on a thread of its own, and fuses them from then on.

    All methods run on MLX's thread.
    """

    def __init__(self, stage: StageModel, limits: StageLimits, key: str, *, outer: bool) -> None:
        """`stage`: was read while nothing was fused; `outer`: with the weights around its layers.

        `key`: what decides its functions: where an earlier process compiled them, they are fused
        at once.
        """
        self._stage = stage
        self._limits = limits
        self._outer = outer
        self._note = note(hashlib.sha256(key.encode()).hexdigest()[:32])
        self._compiling: Future[str] | None = None
        self._began_at = time.monotonic()
        self.has_ended = self._note.exists()
        """Whether functions are fused, or cannot be."""
        if self.has_ended:
            _fuse()
        else:
            _ = COMPILING.acquire()

    def step(self) -> None:
        """Begins to compile; fuses functions where that has ended well."""
        if self.has_ended:
            return
        if self._compiling is not None:
            if self._compiling.done():
                self._fuse_if_same(self._compiling.result())
                self._end()
            return
        log.info("MLX compiles this model's functions beside answers, once for this machine")
        self._began_at = time.monotonic()
        try:
            self._compiling = self._begin()
        except MODEL_FAULTS as fault:
            reason = headline(fault)
            log.info("it compiles them when answers need them: layers do not run alone: %s", reason)
            _fuse()
            self._end()

    def _begin(self) -> Future[str]:
        """The future of `_compile`. Raises MODEL_FAULTS."""
        pool = ThreadPoolExecutor(1, "fusing", _step_back)
        try:
            form = self._limits.hidden_size, DTYPES[self._limits.dtype]
            inputs = [random_rows(rows, *form) for rows in _ROWS]
            single = self._forwards(inputs)
            # First: of what a model computes once and keeps, only one thread may be the first.
            mx.eval(single)
            # Only the thread that made a stream may compute on it; another may build the graph.
            with mx.stream(pool.submit(mx.new_stream, mx.cpu).result()):
                mx.enable_compile()
                functions, fused = _trials(), self._forwards(inputs)
                same = [_same_bits(*pair) for pair in zip(single, fused, strict=True)]
                return pool.submit(_compile, functions, mx.stack(same).all())
        finally:
            mx.disable_compile()
            pool.shutdown(wait=False)

    def _end(self) -> None:
        self.has_ended = True
        COMPILING.release()

    def _fuse_if_same(self, fault: str) -> None:
        if fault == OTHER_BITS:
            log.warning("%s, so operations are not fused, which may cost some speed", fault)
        elif fault:
            _do_without(fault)
        else:
            mx.enable_compile()
            with contextlib.suppress(OSError):  # a full disk: it is compiled again
                self._note.touch(mode=0o700)
            seconds = time.monotonic() - self._began_at
            log.info("this model's functions are compiled and fused, after %.1f s", seconds)

    def _forwards(self, inputs: Sequence[tuple[mx.array, mx.array]]) -> list[mx.array]:
        stage = self._stage
        stage.rope_positions.set_deltas([0])
        caches, outputs = stage.make_caches(), list[mx.array]()
        for ids, entering in inputs:
            outputs.append(
                stage.hidden(ids, entering if stage.first else None, caches, is_lazy=True)
            )
            if self._outer:
                outputs.append(stage.logits(ids, outputs[-1]))
        return [*outputs, *cache_arrays(caches)]


def _step_back() -> None:
    """Lowers this thread's priority, which the compilers that it starts inherit."""
    thread = threading.get_native_id()
    niceness = os.getpriority(os.PRIO_PROCESS, thread) + STEP_BACK
    os.setpriority(os.PRIO_PROCESS, thread, min(niceness, 19))


def _compile(functions: _Trials, same: mx.array) -> str:
    """Computes `same`; returns a short error, "" if it is true."""
    try:
        if fault := _choose(functions):
            return fault
        mx.eval(same)
    except (RuntimeError, OSError) as fault:
        return headline(fault)
    return "" if same.item() else OTHER_BITS


def _same_bits(one: mx.array, other: mx.array) -> mx.array:
    return mx.array_equal(one.flatten().view(mx.uint8), other.flatten().view(mx.uint8))


def _fuse() -> None:
    mx.enable_compile()
    prepare_fusing()


def _do_without(fault: str) -> None:
    mx.disable_compile()
    log.warning(
        "MLX cannot compile for this CPU (%s), so operations are not fused, which may cost some "
        "speed; install g++-12 or clang, and load the model again",
        fault,
    )


def _choose(candidates: _Trials) -> str:
    """Puts the first compiler that MLX can use in PATH as `g++`, which MLX calls, if it is another.

    Returns "", or what is wrong with `g++` where there is none.
    """
    is_first = candidates and candidates[0][0].name == "g++"
    wrong = "" if is_first else "there is no g++"
    for compiler, result in candidates:
        is_gxx = compiler.name == "g++"
        if not (fault := _fault(compiler, result) if is_gxx else _fault_as_gxx(compiler, result)):
            if not is_gxx:
                log.info("MLX fuses with %s, since it cannot use g++: %s", compiler, wrong)
            return ""
        wrong = wrong or fault
    return wrong


def _fault_as_gxx(compiler: Path, result: mx.array) -> str:
    """`_fault` of a compiler that PATH has as `g++`, and keeps if it works."""
    folder = tempfile.TemporaryDirectory(prefix="exo-node-compiler-")
    (Path(folder.name) / "g++").symlink_to(compiler)
    before = os.environ.get("PATH", os.defpath)
    os.environ["PATH"] = f"{folder.name}{os.pathsep}{before}"
    if fault := _fault(compiler, result):
        os.environ["PATH"] = before
        folder.cleanup()
        return fault
    _links.append(folder)
    return ""


def _trials() -> _Trials:
    """A function for each compiler here, to be computed.

    MLX stores compiled functions for later processes, by their operations. The number in each of
    these makes it another function.
    """
    functions = list[tuple[Path, mx.array]]()
    for compiler in filter(None, map(shutil.which, ("g++", *OTHERS))):
        path = Path(compiler).resolve()
        identity = f"{path} {path.stat().st_size} {path.stat().st_mtime_ns}"
        number = 1.0 + zlib.crc32(identity.encode()) / 2**32
        fused = mx.compile(lambda a, n=number: mx.sigmoid(a) * a * n)  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
        functions.append((Path(compiler), fused(mx.zeros((8,)))))
    return functions


def _fault(compiler: Path, result: mx.array) -> str:
    """Computes a trial with `g++`; returns a short error, "" if it works."""
    try:
        mx.eval(result)
    except RuntimeError as fault:
        errors = (line for line in str(fault).splitlines() if "error:" in line)
        message = next(errors, str(fault).splitlines()[-1])
        return f"{compiler}: {message.rpartition('error:')[2].strip()[:200]}"
    return ""
