"""MLX's own Metal kernels of few rows on a CPU: which numbers of rows give a row the same bits.

Their texts are data of the package mlx-metal, of which nothing is kept here: METAL_TEXTS names a
folder with its wheel, as CONTRIBUTING.md says, and a Mac has them installed. They are compiled
after `emulator/metal.h`, with a program that calls them as MLX's library does.
"""

import os
import re
import subprocess
import zipfile
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import Final

import emulated
import pytest

DISPATCH_OF: Final = "0.32.4"
"""The version whose library was read for the choices of kernels in `emulator/metal_*.cpp`: they are
in none of the texts."""
_WHERE: Final = "mlx/include/mlx/backend/metal/kernels/"
_CUT_BEFORE: Final = {
    "quantized.h": "qvm_impl",
    "fp_quantized.h": "fp_qvm_impl",
    "gemv.h": "gemv_wide_gather",
    "sdpa_vector.h": "",
    "fp4.h": "",
    "fp8.h": "",
}
"""The texts, and the function with which what is not needed begins: products of tiles."""
_INCLUDE: Final = re.compile(r'^#include "([\w.]+)".*$', re.M)


def built(program: str) -> Path:
    """The compiled `emulator/{program}.cpp`. Skips the test where the texts or g++ are not here."""
    if emulated.compiler() is None:
        pytest.skip("there is no g++ for MLX's Metal kernels")
    read = _reader()

    def inlined(name: str) -> str:
        if name == emulated.EMULATOR.name:
            return f'#include "{name}"'  # compiled in advance
        if name in _CUT_BEFORE:
            return readable(read(_WHERE + name), _CUT_BEFORE[name])
        text = (emulated.EMULATOR.parent / name).read_text()
        return _INCLUDE.sub(lambda found: inlined(found[1]), text)

    return emulated.built(inlined(f"{program}.cpp"))


def readable(text: str, cut_before: str) -> str:
    """A Metal text for g++: without includes, pragmas and attributes; a threadgroup's arrays are
    one for all of its threads."""
    if cut_before:
        end = re.search(rf"\b{cut_before}\(", text)
        assert end is not None, f"mlx-metal has no {cut_before} any more: read its text again"
        text = text[: text.rindex("\ntemplate", 0, end.start())]
    text = re.sub(r"^#(include|pragma).*$", "", text, flags=re.M)
    text = re.sub(r"\[\[[^\]]*\]\]", "", text)
    return re.sub(r"^(\s*)threadgroup (\w[\w<>, ]*) (\w+)\[", r"\1static \2 \3[", text, flags=re.M)


def row_sets(program: Path, *arguments: object) -> str:
    """The sets of numbers of rows whose calls give each row the same bits, such as `1 | 2-12`."""
    command = [program, *map(str, arguments)]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    hashes: dict[int, dict[int, set[str]]] = {}
    for line in told.splitlines():
        count, first, *rows = line.split()
        for row, bits in enumerate(rows, int(first)):
            hashes.setdefault(int(count), {}).setdefault(row, set()).add(bits)
    sets: list[list[int]] = []
    for count, rows in hashes.items():
        same = next((each for each in sets if _agree(hashes[each[0]], rows)), None)
        sets.append([count]) if same is None else same.append(count)
    return " | ".join(map(_as_text, sets))


def _agree(one: dict[int, set[str]], other: dict[int, set[str]]) -> bool:
    """Whether each common row has one value, wherever it is among the others."""
    return all(len(one[row] | other[row]) == 1 for row in one.keys() & other.keys())


def _as_text(counts: Sequence[int]) -> str:
    first, last = counts[0], counts[-1]
    if list(counts) != [*range(first, last + 1)]:
        return ",".join(map(str, counts))
    return str(first) if first == last else f"{first}-{last}"


class _Texts:
    """Reads files of mlx-metal, from its wheel or where it is installed."""

    def __init__(self, wheel: Path | None) -> None:
        self._wheel = wheel

    def __call__(self, name: str) -> str:
        if self._wheel is None:
            return Path(str(distribution("mlx-metal").locate_file(name))).read_text()
        with zipfile.ZipFile(self._wheel) as files:
            return files.read(name).decode()


def _reader() -> _Texts:
    if folder := os.environ.get("METAL_TEXTS"):
        pinned = f"mlx_metal-{version('mlx')}-*.whl"
        wheels = sorted(Path(folder).glob(pinned))
        assert wheels, f"METAL_TEXTS is {folder}, where no {pinned} is: see CONTRIBUTING.md"
        return _Texts(wheels[0])
    try:
        _ = distribution("mlx-metal")
    except PackageNotFoundError:
        pytest.skip("METAL_TEXTS names no folder with the wheel of mlx-metal: see CONTRIBUTING.md")
    return _Texts(None)
