"""One model's folder on this disk: whose files it has, which of them count, when they changed.

Blocks; raises OSError for the disk's own trouble.
"""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, cast

from ...placement.ids import ModelId
from ...placement.library import CARD_FILE
from ...shard.checkpoint.chat_format import EXTRA_FILES
from ...shard.checkpoint.checkpoint import HEAD_FILES, is_weight_file
from ...shard.checkpoint.embedders import POOLING_FILE
from ...shard.checkpoint.files import write_atomic

Stamp = tuple[tuple[str, int, int], ...]

CONFIG: Final = "config.json"
COPY_FILE: Final = "exo-copy.json"
"""In a folder that was copied from a peer: a `CopyOrigin`."""
_TEXT_SUFFIXES: Final = (".json", ".jinja", ".model", ".tiktoken")
_TEXT_NAMES: Final = ("merges.txt", "vocab.txt")
_NESTED: Final = tuple(n for n in (*HEAD_FILES, POOLING_FILE, *EXTRA_FILES) if "/" in n)


@dataclass(frozen=True, slots=True)
class Place:
    """One model's folder, and the id that requests use for it.

    `hub`: its files are a hub repository's, so that a card of that id holds for it.
    """

    id: ModelId
    folder: Path
    hub: bool = False
    partial: bool = False
    """Whether it is a copy from a peer that is not whole."""
    missing: tuple[str, ...] = ()
    """Files that an unfinished download lacks."""
    fault: str = ""
    """Why it cannot be read."""


@dataclass(frozen=True, slots=True)
class CopyOrigin:
    """The model that a folder was copied from; `fingerprint` as `Checkpoint.fingerprint`."""

    model: str
    from_hub: bool
    fingerprint: str
    whole: bool


def read_origin(folder: Path) -> CopyOrigin | None:
    """The origin of a copy, or None. A `COPY_FILE` that cannot be read is a partial copy's."""
    try:
        raw: object = json.loads((folder / COPY_FILE).read_bytes())
        return CopyOrigin(**cast("dict[str, Any]", raw))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, TypeError):
        return CopyOrigin(folder.name, from_hub=False, fingerprint="", whole=False)


def write_origin(folder: Path, origin: CopyOrigin) -> None:
    write_atomic(folder / COPY_FILE, json.dumps(asdict(origin), indent=1).encode(), mode=0o644)


def repository_folder(folder: Path) -> Path | None:
    """The folder with all files of a hub model: a snapshot's repository, or a whole copy itself.
    None for other models."""
    above = folder.resolve().parent
    if above.name == "snapshots" and above.parent.name.startswith("models--"):
        return above.parent
    origin = read_origin(folder)
    return folder if origin is not None and origin.from_hub else None


def is_model_file(path: str) -> bool:
    """Whether a repository's file is downloaded: weights, configs, tokenizer, chat template.

    Never code (.py) and never a pickle (.bin, .pt), and of folders only the MTP head's, that of an
    embedder's pooling, and that of more chat templates.
    """
    if "/" in path:
        return path in _NESTED
    return is_weight_file(path) or path in _TEXT_NAMES or path.endswith(_TEXT_SUFFIXES)


def is_copied_file(path: str) -> bool:
    """Whether peers copy a model's file: what a download fetches, and the card beside it."""
    return path == CARD_FILE or (is_model_file(path) and path != COPY_FILE)


def bytes_in(path: Path) -> int:
    """The bytes of a file, or of all files below a folder; a link counts as itself."""
    paths = path.rglob("*") if path.is_dir() else [path]
    return sum(each.lstat().st_size for each in paths if not each.is_dir())


def stamp(folder: Path) -> Stamp:
    """The names, sizes and times of a folder's files, links followed: equal while none changes."""
    entries: list[tuple[str, int, int]] = []
    nested = [folder / name for name in _NESTED]
    try:
        paths = [Path(entry.path) for entry in os.scandir(folder)]
    except OSError:
        return ()
    for path in (*sorted(paths), *nested):
        try:
            status = path.stat()
        except OSError:
            if os.path.islink(path):
                entries.append((path.name, -1, 0))
            continue
        # The time of changes, not of contents: permissions count, too.
        entries.append((path.name, status.st_size, status.st_ctime_ns))
    return tuple(entries)
