"""The API tokens of a running node, read again whenever their file has changed."""

import hmac
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ...placement.errors import InvalidSettings
from ..machine.background_reads import BackgroundRead
from .token_file import (
    TOKENS_FILE,
    USES_FILE,
    StoredToken,
    digest,
    read_token_file,
    read_uses,
    write_uses,
)

_LOG: Final = logging.getLogger(__name__)
_USE_S: Final = 60
"""The shortest time between two writes of a token's last use, which spares the disk."""

_FileVersion = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _TokenSet:
    version: _FileVersion | str | None = None
    """The version of the file, or the reason why it cannot be read."""
    tokens: tuple[StoredToken, ...] = ()
    is_required: bool = False
    trouble: str = ""


class ApiTokens:
    """The tokens of one data folder, as of the last `refresh`.

    `always`: clients need a key even before a token was created, as on a node that listens beyond
    loopback. Not safe for threads: all requests are on one event loop.
    """

    def __init__(
        self, data_dir: Path, *, always: bool = False, clock: Callable[[], float] = time.time
    ) -> None:
        self._data_dir = data_dir
        self._clock = clock
        self._always = always
        self._set = BackgroundRead(data_dir / TOKENS_FILE, self._read)
        self._uses = dict(read_uses(data_dir))
        self._writing: threading.Thread | None = None

    async def refresh(self) -> None:
        """Reads the file again if it has changed."""
        await self._set.refresh()

    @property
    def is_required(self) -> bool:
        """Whether clients need a key.

        Once there was a file of tokens, valid or not, they do until `exo-node token off`: neither
        the last token's revocation nor a removed folder may open the API while the node runs.
        """
        return self._set.value.is_required

    @property
    def trouble(self) -> str:
        """The reason why the file's tokens are not accepted; empty where they are."""
        return self._set.value.trouble

    def accepts(self, candidates: Iterable[bytes]) -> bool:
        """Whether one of the candidates is a token."""
        return bool(self._matches(candidates))

    def cache_salt(self, candidates: Iterable[bytes]) -> bytes:
        """8 bytes that identify the first candidate that is a token, empty where none is.

        Only requests of one salt share cached prefixes, so holders of different tokens do not learn
        each other's prompts from `cached_tokens`. Runners receive the salt and neither a token nor
        its digest, which is the key of the hash and does not follow from 8 bytes.
        """
        matches = self._matches(candidates)
        key = bytes.fromhex(matches[0].sha256) if matches else b""
        return hmac.digest(key, b"exo-node prefix cache", "sha256")[:8] if key else b""

    def _matches(self, candidates: Iterable[bytes]) -> list[StoredToken]:
        """The tokens among the candidates. All are compared with all, in constant time each."""
        digests = [digest(each) for each in candidates]
        matches = [
            stored
            for stored in self._set.value.tokens
            if any([hmac.compare_digest(stored.sha256, each) for each in digests])
        ]
        for stored in matches:
            self._note_use(stored)
        return matches

    def _read(self, before: _TokenSet | None) -> _TokenSet:
        before, version = before or _TokenSet(is_required=self._always), self._file_version()
        if version == before.version:
            return before
        try:
            file = read_token_file(self._data_dir)
        except InvalidSettings as fault:
            if fault.message != before.trouble:
                _LOG.error("%s", fault.message)
            return _TokenSet(version, is_required=True, trouble=fault.message)
        if file is None:
            return _TokenSet(version, is_required=before.is_required)
        return _TokenSet(version, file.tokens, is_required=self._always or not file.off)

    def _file_version(self) -> _FileVersion | str:
        """Numbers of which one differs after the file was replaced, or an OS error's text."""
        try:
            status = (self._data_dir / TOKENS_FILE).lstat()
        except OSError as fault:
            return os.strerror(fault.errno or 0)
        return (
            status.st_ino,
            status.st_size,
            status.st_mtime_ns,
            status.st_ctime_ns,
            status.st_mode,
            status.st_uid,
        )

    def _note_use(self, token: StoredToken) -> None:
        now = int(self._clock())
        # A clock that was set back must not silence this for the difference.
        if 0 <= now - self._uses.get(token.id, -_USE_S) < _USE_S:
            return
        ids = {each.id for each in self._set.value.tokens}
        self._uses = {id: at for id, at in self._uses.items() if id in ids} | {token.id: now}
        if self._writing is None or not self._writing.is_alive():
            # Beside the loop, which a disk that hangs would stop.
            self._writing = threading.Thread(
                target=self._write, args=(self._uses,), name=USES_FILE, daemon=True
            )
            self._writing.start()

    def _write(self, uses: Mapping[str, int]) -> None:
        try:
            write_uses(self._data_dir, uses)
        except OSError as fault:
            _LOG.warning("the last use of API tokens is not written: %s", fault.strerror)
