"""A copy of a peer's model on its way to this disk: what is here, checked, and what is missing.

A file gathers under a name of its own and takes its real one when its hash was checked, so that
what a killed node leaves is whole files and one that goes on. Blocks; raises OSError for the disk's
own trouble.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final

from ...placement.errors import DownloadFailed, InvalidCheckpoint
from ...placement.library import CARD_FILE
from ...proto import peer_pb2 as pb
from ...shard.checkpoint.checkpoint import is_weight_file
from ...shard.checkpoint.files import write_atomic
from ...shard.checkpoint.headers import (
    MAX_HEADER_BYTES,
    Tensor,
    header_end,
    parse_header,
    read_header,
)
from ...shard.checkpoint.hub_cache import is_wanted
from ...shard.checkpoint.progress import partial_of, size_of
from ...shard.checkpoint.stage_files import HEADERS
from ..models.places import COPY_FILE, Copied, copied

HERE: Final = "--data-dir"
"""The `param` of an error that no other peer would help against."""
MAX_FILES: Final = 10_000
MAX_FILE_BYTES: Final = 1 << 44
MAX_TEXT_BYTES: Final = 128 << 20
"""Of a config, a tokenizer or an index."""

_PART: Final = re.compile(r"(?!\.)[^/\\\0]{1,200}")
_SHA256: Final = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Wanted:
    """A file as a peer offers it; `sha256` empty: the peer has to compute it."""

    path: str
    size: int
    sha256: str


def checked_offer(offer: pb.ModelOffer, peer: str) -> Mapping[str, Wanted]:
    """What may be copied of a peer's offer, by path. Raises DownloadFailed, naming the peer."""
    files: dict[str, Wanted] = {}
    for file in offer.files:
        weights = is_weight_file(file.path)
        limit = MAX_FILE_BYTES if weights else MAX_TEXT_BYTES
        usual = file.path == CARD_FILE or (is_wanted(file.path) and file.path != COPY_FILE)
        named = file.path.isprintable() and len(file.path) <= 200
        if not usual or not named or file.path in files or file.size > limit:
            raise _refused(peer, f"a file {file.path[:80]!r} of {file.size} bytes")
        if not _SHA256.fullmatch(file.sha256) and not (weights and not file.sha256):
            raise _refused(peer, f"the hash {file.sha256[:80]!r} of {file.path[:80]!r}")
        files[file.path] = Wanted(file.path, file.size, file.sha256)
    if len(files) > MAX_FILES or "config.json" not in files or not any(map(is_weight_file, files)):
        raise _refused(peer, f"{len(files)} files that are no model")
    if not _SHA256.fullmatch(offer.fingerprint):
        raise _refused(peer, f"the fingerprint {offer.fingerprint[:80]!r}")
    return MappingProxyType(files)


def folder_of(root: Path, model: str) -> Path | None:
    """Where a copy of the model lies in exo-node's own folder; None: its id is no path there."""
    parts = model.split("/")
    if len(parts) > 2 or not all(_PART.fullmatch(part) and part.isprintable() for part in parts):
        return None
    return root.joinpath(*parts)


class CopyFolder:
    """The folder of one model's copy."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def begin(self, model: str, offer: pb.ModelOffer) -> None:
        """Makes the folder; of a copy of another revision nothing stays.

        Raises DownloadFailed where something else lies there.
        """
        before = copied(self.folder)
        if before is None and os.path.lexists(self.folder):
            raise DownloadFailed(
                f"{self.folder} is in the way: it is no copy that exo-node made. Move it away, or "
                f"mend it, so that {model} can be copied there.",
                param=HERE,
            )
        origin = Copied(model, offer.from_hub, offer.fingerprint, whole=False)
        if before is not None and replace(before, whole=False) != origin:
            shutil.rmtree(self.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._say(replace(origin, whole=before == replace(origin, whole=True)))

    def has(self, file: Wanted) -> bool:
        """Whether the file is here under its own name; a small one's hash is looked at again."""
        path = self.folder / file.path
        if not path.is_file() or path.stat().st_size != file.size:
            return False
        if is_weight_file(file.path):  # its hash was checked before it took its name
            return True
        return hashlib.sha256(path.read_bytes()).hexdigest() == file.sha256

    def here(self, file: Wanted) -> int:
        """Bytes of the file that need not be sent again."""
        return file.size if self.has(file) else self.begun(file)

    def begun(self, file: Wanted) -> int:
        """Bytes that gathered so far; too many are dropped."""
        part = partial_of(self.folder / file.path)
        if size_of(part) > file.size:
            part.unlink()
        return size_of(part)

    def append(self, file: Wanted, data: bytes) -> None:
        """The next bytes of a file; nobody may write more of them than it has."""
        part = partial_of(self.folder / file.path)
        part.parent.mkdir(parents=True, exist_ok=True)
        with part.open("ab") as out:
            _ = out.write(data[: file.size - out.tell()])

    def finish(self, file: Wanted, sha256: str) -> str:
        """Gives a complete file its name where its hash is right; else drops it. Its own hash."""
        path = self.folder / file.path
        part = partial_of(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("ab"):  # an empty file has had no bytes to make it
            pass
        with part.open("rb") as data:
            digest = hashlib.file_digest(data, "sha256").hexdigest()
            os.fsync(data.fileno())
        if digest == sha256:
            os.replace(part, path)
        else:
            part.unlink()
        return digest

    def lacks_header(self, file: Wanted) -> bool:
        return not self.has(file) and not (self.folder / HEADERS / file.path).exists()

    def put_header(self, file: Wanted, data: bytes) -> None:
        """The length and header of a weight file. Raises InvalidCheckpoint."""
        path = self.folder / HEADERS / file.path
        if header_end(path, data) != file.size:
            raise InvalidCheckpoint(f"{file.path} has {file.size} bytes, and its header says else")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, data)

    def tensors(self, files: Iterable[Wanted]) -> list[Tensor]:
        """All tensors of the weight files by their headers. Raises InvalidCheckpoint."""
        found: list[Tensor] = []
        for file in files:
            path = self.folder / file.path
            if self.has(file):
                header, size = read_header(path)
            else:
                data = (self.folder / HEADERS / file.path).read_bytes()
                header, size = data[8:], header_end(path, data) - len(data)
            found += parse_header(path, file.path, header, size)
        return found

    def weights(self) -> list[Wanted]:
        """The weight files that are here, and those of which the header is."""
        found: dict[str, int] = {}
        for root in (self.folder / HEADERS, self.folder):
            for path in root.rglob("*.safetensors"):
                name = path.relative_to(root).as_posix()
                if is_weight_file(name):
                    whole = root == self.folder
                    found[name] = path.stat().st_size if whole else _size_by_header(path)
        return [Wanted(name, size, "") for name, size in sorted(found.items())]

    def complete(self) -> None:
        """Every file is here: from now on it is a model like others."""
        shutil.rmtree(self.folder / HEADERS, ignore_errors=True)
        if (origin := copied(self.folder)) is not None:
            self._say(replace(origin, whole=True))

    def free_bytes(self) -> int:
        return shutil.disk_usage(self.folder).free

    def _say(self, origin: Copied) -> None:
        data = json.dumps(asdict(origin), indent=1).encode()
        write_atomic(self.folder / COPY_FILE, data, mode=0o644)


def _size_by_header(path: Path) -> int:
    return header_end(path, path.read_bytes())


def header_length(data: bytes, file: Wanted) -> int:
    """From a file's first 8 bytes. Raises InvalidCheckpoint."""
    length = int.from_bytes(data, "little")
    if len(data) != 8 or length > min(MAX_HEADER_BYTES, file.size - 8):
        raise InvalidCheckpoint(f"{file.path} claims a header of {length} bytes")
    return length


def _refused(peer: str, what: str) -> DownloadFailed:
    return DownloadFailed(f"{peer} offers {what}; nothing is copied from it", param="model")
