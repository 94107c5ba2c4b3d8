"""The folder of a model that is copied from a peer: files that are here, checked.

Blocks; raises OSError for the disk's own trouble.
"""

import hashlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Final

from ...placement.card import ModelCard
from ...placement.errors import DownloadFailed
from ...placement.ids import ModelId
from ...proto import peer_pb2 as pb
from ...shard.checkpoint.checkpoint import is_weight_file
from .identifiers import FilePath, Sha256
from .model_folder import CopyOrigin, is_copied_file, read_origin, write_origin
from .transfers import PARTIAL, PartialFile, RemoteFile

HERE: Final = "--data-dir"
"""The `param` of an error that no other peer would help against."""
MAX_FILES: Final = 10_000
MAX_FILE_BYTES: Final = 1 << 44
MAX_TEXT_BYTES: Final = 128 << 20
"""The largest config, tokenizer or index."""


def checked_offer(offer: pb.ModelOffer, peer: str) -> Mapping[str, RemoteFile]:
    """The files of a peer's offer, by path. Raises DownloadFailed, naming the peer."""
    files: dict[str, RemoteFile] = {}
    for file in offer.files:
        path = FilePath.read(file.path)
        limit = MAX_FILE_BYTES if is_weight_file(file.path) else MAX_TEXT_BYTES
        if path is None or not is_copied_file(path) or path in files or file.size > limit:
            raise _refused(peer, f"a file {file.path[:80]!r} of {file.size} bytes")
        hash = Sha256.read(file.sha256)
        if hash is None and not (is_weight_file(path) and not file.sha256):
            raise _refused(peer, f"the hash {file.sha256[:80]!r} of {path[:80]!r}")
        files[path] = RemoteFile(path, file.size, hash)
    if len(files) > MAX_FILES or "config.json" not in files or not any(map(is_weight_file, files)):
        raise _refused(peer, f"{len(files)} files that are no model")
    if Sha256.read(offer.fingerprint) is None:
        raise _refused(peer, f"the fingerprint {offer.fingerprint[:80]!r}")
    return MappingProxyType(files)


def offered_card(offer: pb.ModelOffer, model: ModelId, peer: str) -> ModelCard:
    """The card of a model that a peer offers. Raises DownloadFailed, naming the peer."""
    try:
        card = ModelCard.model_validate_json(offer.card)
    except ValueError as fault:
        raise _refused(peer, "no card of the model") from fault
    if card.id != model or Sha256.read(offer.fingerprint) is None:
        raise _refused(peer, f"a card of {card.id[:80]!r}, fingerprint {offer.fingerprint[:80]!r}")
    return card


class CopyFolder:
    """The folder of one model's copy."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def begin(self, model: str, offer: pb.ModelOffer) -> None:
        """Creates the folder; a copy of another revision is deleted.

        Raises DownloadFailed where something else lies there.
        """
        before = read_origin(self.path)
        if before is None and os.path.lexists(self.path):
            raise DownloadFailed(
                f"{self.path} is in the way: it is no copy that exo-node made. Move it away, or "
                f"mend it, so that {model} can be copied there.",
                param=HERE,
            )
        origin = CopyOrigin(model, offer.from_hub, offer.fingerprint, whole=False)
        if before is not None and replace(before, whole=False) != origin:
            self._delete_copy()
        self.path.mkdir(parents=True, exist_ok=True)
        write_origin(self.path, replace(origin, whole=before == replace(origin, whole=True)))

    def has(self, file: RemoteFile) -> bool:
        """Whether the file is here under its own name; a small one's hash is checked again."""
        path = self.path / file.path
        if not path.is_file() or path.stat().st_size != file.size:
            return False
        if is_weight_file(file.path):  # its hash was checked before it took its name
            return True
        return hashlib.sha256(path.read_bytes()).hexdigest() == file.hash

    def missing(self, files: Iterable[RemoteFile]) -> list[RemoteFile]:
        return [file for file in files if not self.has(file)]

    def partial(self, file: RemoteFile) -> PartialFile:
        return PartialFile(self.path / file.path, file.size)

    def _delete_copy(self) -> None:
        """Deletes the files of a copy. Whatever else was put beside them stays."""
        for path in self.path.rglob("*"):
            name = path.relative_to(self.path).as_posix().removesuffix(PARTIAL)
            if is_copied_file(name) and not path.is_dir():
                path.unlink()

    def complete(self) -> None:
        """Marks the copy whole: from now on it is a model like others."""
        if (origin := read_origin(self.path)) is not None:
            write_origin(self.path, replace(origin, whole=True))


def _refused(peer: str, what: str) -> DownloadFailed:
    return DownloadFailed(f"{peer} offers {what}; nothing is copied from it", param="model")
