"""The weight files that one stage reads; of the others it needs only the headers."""

import re
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from .checkpoint import HEAD_FILES
from .headers import Tensor, header_end
from .vision import TOWER_PREFIXES

HEADERS: Final = "headers"
"""The folder in a partial copy with the headers of the weight files that it lacks."""
NOT_COPIED: Final = "partial"
"""The `param` of the error where a stage read what its node's partial copy lacks."""

_LAYER = re.compile(r"(?:^|\.)(?:layers|blocks|h)\.(\d{1,6})\.")


def files_of_stage(
    tensors: Iterable[Tensor], first: int, end: int, layers: int, *, generator: bool
) -> frozenset[str]:
    """The files with tensors of layers [first, end); a generator also reads those of no layer.

    A tensor's layer follows from its name. Where a class names them otherwise, the load names the
    file that it lacks, since the data of a stand-in cannot be read.
    """
    return frozenset(t.file for t in tensors if _needs(t, first, end, layers, generator))


@contextmanager
def stand_ins(folder: Path) -> Generator[tuple[Path, list[tuple[Path, int]]]]:
    """A view of a partial copy that opens like a whole model: a folder of links and stand-ins.

    A stand-in has a header and a hole for its data. Yields the view, and each stand-in with where
    its header ends: once the files are open, `cut` truncates them there, so that no zero of a hole
    is ever read as a weight.
    """
    with TemporaryDirectory() as root:
        view = Path(root) / folder.name
        headers = folder / HEADERS
        for path in folder.rglob("*"):
            if path.is_file() and headers not in path.parents:
                _placed(view, path.relative_to(folder)).symlink_to(path)
        lacking = [
            (path, name)
            for path in headers.rglob("*.safetensors")
            if not (view / (name := path.relative_to(headers))).exists()
        ]
        yield view, [_stand_in(path, _placed(view, name)) for path, name in lacking]


def cut(placeholders: Iterable[tuple[Path, int]]) -> None:
    """Makes every later read of a stand-in's data an error."""
    for path, end in placeholders:
        with path.open("r+b") as file:
            _ = file.truncate(end)


def _placed(view: Path, name: Path) -> Path:
    path = view / name
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _stand_in(header: Path, path: Path) -> tuple[Path, int]:
    data = header.read_bytes()
    _ = path.write_bytes(data)
    with path.open("r+b") as file:
        _ = file.truncate(header_end(header, data))
    return path, len(data)


def _needs(tensor: Tensor, first: int, end: int, layers: int, generator: bool) -> bool:
    of_generator = tensor.file in HEAD_FILES or tensor.name.startswith(("mtp.", *TOWER_PREFIXES))
    match = None if of_generator else _LAYER.search(tensor.name)
    layer = layers if match is None else int(match[1])
    return first <= layer < end or (generator and layer >= layers)
