"""Facts of a model's files that lists show beside its card."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from ...placement.card import Capability
from ...shard.checkpoint.chat_format import capabilities
from ...shard.checkpoint.generation_config import read_generation_config
from ...shard.checkpoint.vision import may_read_images
from .model_folder import Stamp, stamp

Facts = TypeVar("Facts")


@dataclass(frozen=True, slots=True)
class FileFacts:
    """Facts of a model's files that lists show beside its card.

    `digest`: 32 hex digits over the files' names and sizes; "" of a model that is not here.
    `sampling`: of generation_config.json. `notes`: what of optional files is not used, and why.
    """

    capabilities: tuple[Capability, ...] = ()
    digest: str = ""
    sampling: Mapping[str, float] = field(default_factory=dict[str, float])
    notes: tuple[str, ...] = ()


def read_file_facts(folder: Path, files: Stamp) -> FileFacts:
    """The facts of the `files` of a folder. Blocks."""
    listing = "\n".join(f"{name}\t{size}" for name, size, _ in files)
    notes: list[str] = []
    abilities = capabilities(folder, notes)
    if may_read_images(folder):
        abilities += ("vision",)
    published = read_generation_config(folder)
    digest = hashlib.sha256(listing.encode()).hexdigest()[:32]
    return FileFacts(abilities, digest, published.sampling, (*published.notes, *notes))


class FolderCache(Generic[Facts]):
    """Facts read from a folder, read again once a file of it has changed."""

    def __init__(self, read: Callable[[Path, Stamp], Facts]) -> None:
        self._read = read
        self._facts: dict[Path, tuple[Stamp, Facts]] = {}

    def get(self, folder: Path) -> Facts:
        current = stamp(folder)
        cached = self._facts.get(folder)
        if cached is None or cached[0] != current:
            cached = self._facts[folder] = (current, self._read(folder, current))
        return cached[1]
