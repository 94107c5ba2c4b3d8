"""Facts of a model's files that lists show beside its card. Blocks."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from ...placement.card import Capability
from ...shard.checkpoint.chat_format import capabilities
from .places import Stamp


@dataclass(frozen=True, slots=True)
class FileFacts:
    """`digest`: 32 hex digits over the files' names and sizes; "" of a model that is not here."""

    capabilities: tuple[Capability, ...] = ()
    digest: str = ""


def read_file_facts(folder: Path, files: Stamp) -> FileFacts:
    """`files`: the folder's stamp."""
    listing = "\n".join(f"{name}\t{size}" for name, size, _ in files)
    return FileFacts(capabilities(folder), hashlib.sha256(listing.encode()).hexdigest()[:32])
