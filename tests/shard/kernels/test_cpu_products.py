"""Products of our own on a CPU: right, in one order whatever the rows, and in MLX's place."""

import ctypes
import importlib.util
import itertools
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from exo_node.shard.kernels import cpu_code, cpu_products, install
from exo_node.shard.kernels.cpu_code import CannotStandIn

ROW_MAJOR, PLAIN, TRANSPOSED = 101, 111, 112


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Beside MLX's, so that both can be called."""
    try:
        code = cpu_code.machine_code()
    except CannotStandIn as fault:
        pytest.skip(str(fault))
    file = tmp_path_factory.mktemp("products") / "products.so"
    _ = file.write_bytes(code)
    return ctypes.CDLL(str(file))


def floats(values: mx.array) -> Any:
    flat: Any = mx.flatten(values).tolist()
    return (ctypes.c_float * len(flat))(*flat)


def product(
    library: Any, a: mx.array, b: mx.array, *, ta: bool, tb: bool, onto: mx.array | None = None
) -> mx.array:
    """a (M, K) with b (K, N), handed over as they are or transposed; 0.5 a b + 2 `onto`."""
    (m, depth), n = a.shape, b.shape[1]
    out = floats(mx.full((m, n), float("nan")) if onto is None else onto)
    alpha, beta = (1.0, 0.0) if onto is None else (0.5, 2.0)
    library.cblas_sgemm(
        ROW_MAJOR,
        TRANSPOSED if ta else PLAIN,
        TRANSPOSED if tb else PLAIN,
        *(m, n, depth, ctypes.c_float(alpha)),
        *(floats(a.T if ta else a), m if ta else depth),
        *(floats(b.T if tb else b), depth if tb else n, ctypes.c_float(beta)),
        *(out, n),
    )
    return mx.unflatten(mx.array(list(out)), 0, (m, n))


SHAPES = [
    *((m, n, k) for m in (1, 2, 3, 4, 5, 7) for n, k in ((1, 9), (13, 8), (37, 21))),
    (50, 33, 40),
    (3, 5, 1),
]


@pytest.mark.parametrize(("ta", "tb"), [*itertools.product((False, True), repeat=2)])
def test_they_are_the_products(library: Any, ta: bool, tb: bool) -> None:
    for m, n, k in SHAPES:
        keys = mx.random.split(mx.random.key(m * n + k), 3)
        a, b, c = (
            mx.random.normal(s, key=key)
            for s, key in zip(((m, k), (k, n), (m, n)), keys, strict=True)
        )
        expected = (a[:, :, None] * b[None]).sum(1)
        assert mx.allclose(product(library, a, b, ta=ta, tb=tb), expected, atol=1e-5)
        onto = product(library, a, b, ta=ta, tb=tb, onto=c)
        assert mx.allclose(onto, 0.5 * expected + 2 * c, atol=1e-5)


@pytest.mark.parametrize("tb", [False, True])
def test_a_number_does_not_depend_on_other_rows_or_columns(library: Any, tb: bool) -> None:
    a, b = mx.random.normal((53, 37), key=mx.random.key(1)), mx.random.normal((37, 70))
    whole = product(library, a, b, ta=False, tb=tb)
    for rows, columns in ((1, 70), (2, 70), (3, 69), (4, 33), (5, 9), (7, 8), (48, 41), (53, 1)):
        part = product(library, a[-rows:], b[:, :columns], ta=False, tb=tb)
        assert mx.array_equal(part, whole[-rows:, :columns]), (rows, columns)


def test_zeros_after_a_row_change_nothing(library: Any) -> None:
    """A batch's attention reads further than a request has rows; what is there counts nothing."""
    a, b = mx.random.normal((2, 19), key=mx.random.key(2)), mx.random.normal((19, 24))
    longer = mx.pad(a, [(0, 0), (0, 13)]), mx.concatenate([b, mx.random.normal((13, 24))])
    assert mx.array_equal(
        product(library, a, b, ta=False, tb=False), product(library, *longer, ta=False, tb=False)
    )


_SCARCE = b"""
#include <stdlib.h>
size_t most = 0;
static void *scarce(size_t size) { return size > most ? NULL : malloc(size); }
#define malloc scarce
"""


@pytest.mark.usefixtures("library")
def test_without_room_to_turn_a_matrix_rows_are_turned_one_by_one_or_it_says_so(
    library: Any, tmp_path: Path
) -> None:
    compiler = next(path for name in ("gcc", "cc", "clang") if (path := shutil.which(name)))
    text = Path(cpu_code.__file__).with_name("cpu_products.c").read_bytes()
    file = tmp_path / "scarce.so"
    _ = file.write_bytes(cpu_code.compile_library(compiler, _SCARCE + text))
    scarce: Any = ctypes.CDLL(str(file))
    a, b = mx.random.normal((13, 37), key=mx.random.key(3)), mx.random.normal((37, 21))
    ctypes.c_size_t.in_dll(scarce, "most").value = 37 * 4
    for tb in (False, True):
        actual, expected = (product(each, a, b, ta=True, tb=tb) for each in (scarce, library))
        assert mx.array_equal(actual, expected)
    child = f"""
import ctypes
import importlib.util
c = (ctypes.c_float * 4)()
one = ctypes.c_float(1)
ctypes.CDLL({str(file)!r}).cblas_sgemm(101, 112, 111, 2, 2, 2, one, c, 2, c, 2, one, c, 2)
"""
    ended = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True)
    assert ended.returncode < 0
    assert "no memory for 8 bytes of a product" in ended.stderr


_CHILD = """
import time
from exo_node.shard.model import loader_import
from exo_node.shard.kernels import cpu_products as c
import mlx.core as mx
def more():
    before = c._state.computed
    _ = (mx.ones((3, 40)) @ mx.ones((40, 50))).sum().item()
    return c._state.computed - before
print(more(), c.choose_products("auto", time.perf_counter).used, more())
print(c.choose_products("mlx", time.perf_counter).reason, more())
"""


@pytest.mark.usefixtures("library")
def test_a_runner_computes_with_them_once_they_were_tried() -> None:
    process = subprocess.run(
        [sys.executable, "-c", _CHILD], capture_output=True, text=True, check=True, timeout=300
    )
    assert process.stdout.splitlines() == ["0 True 1", "EXO_KERNELS is mlx 0"]


@pytest.mark.usefixtures("library")
def test_the_tests_own_processes_compute_with_them_as_well() -> None:
    """If `as_runners` is imported after MLX, the only sign is that all takes twice as long."""
    assert install.choose_products("auto", time.process_time).used
    products = cpu_products._state  # pyright: ignore[reportPrivateUsage]
    assert isinstance(products, cpu_products.Products)
    before = products.computed
    _ = (mx.ones((3, 40)) @ mx.ones((40, 50))).sum().item()
    assert products.computed == before + 1


def nowhere(*_: str) -> None:
    """There is no folder to keep machine code in."""


@pytest.fixture
def _afresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(cpu_products, "_state", "nothing was tried")
    monkeypatch.setattr(cpu_code, "private_folder", nowhere)
    yield


def reason() -> str:
    cpu_products.stand_in()
    return cpu_products.choose_products("auto", lambda: 0.0).reason


@pytest.mark.usefixtures("library", "_afresh")
def test_without_a_compiler_mlx_computes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    paths: list[str | None] = [None]

    def which(_: str) -> str | None:
        return paths[0]

    monkeypatch.setattr(shutil, "which", which)
    assert reason() == "there is no C compiler: install gcc, and start the node again"
    refuses = tmp_path / "gcc"
    _ = refuses.write_text("#!/bin/sh\necho 'x.c:1: error: no such thing' >&2\nexit 1\n")
    refuses.chmod(0o755)
    paths[0] = str(refuses)
    assert reason() == f"{refuses} refuses them: x.c:1: error: no such thing"
    _ = refuses.write_text("not a program")
    os.chmod(refuses, 0o755)
    assert reason() == f"{refuses} does not run: OSError"


@pytest.mark.usefixtures("_afresh")
def test_on_other_machines_mlx_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert reason() == "they are written for Linux on x86-64"


def test_mlx_is_found_behind_other_folders_of_its_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its name is that of a namespace, of which each folder with that name is a part."""
    library = cpu_code.mlx_library()
    spec = importlib.util.find_spec("mlx")
    assert spec is not None
    homes = [str(tmp_path), *(spec.submodule_search_locations or ())]
    monkeypatch.setattr(spec, "submodule_search_locations", homes)
    monkeypatch.setattr(cpu_code, "find_spec", lambda _: spec)  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    assert cpu_code.mlx_library() == library


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(("trials", "used"), [(1, True), (2, True), (3, False)])
def test_what_other_threads_compute_during_a_trial_changes_no_choice(
    trials: int, used: bool
) -> None:
    """Readings come in pairs, 24 a trial: 12 of ours and then 12 of MLX's."""
    busy = [0.0, 9.0] * 12 + [0.0, 1.0] * 12
    times = itertools.accumulate(busy * trials + [0.0, 1.0] * 12 + [0.0, 2.0] * 12)
    chosen = cpu_products.choose_products("auto", times.__next__)
    try:
        assert chosen.used is used
    finally:
        assert cpu_products.choose_products("auto", time.process_time).used, "for the other tests"
