"""The API tokens as a node knows them: read again whenever their file has changed."""

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
    read_tokens,
    read_uses,
    write_uses,
)

_LOG: Final = logging.getLogger(__name__)
_USE_S: Final = 60
"""A token's use is written that often at most, so that requests do not wear out the disk."""

_State = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Content:
    state: _State | str | None = None
    tokens: tuple[StoredToken, ...] = ()
    wanted: bool = False
    trouble: str = ""


class ApiTokens:
    """The tokens of one data folder, as of the last `refresh`.

    `always`: clients need a key also where no token was ever made, as on a node that listens beyond
    loopback. Not safe for threads: requests come on one loop.
    """

    def __init__(
        self, data_dir: Path, *, always: bool = False, clock: Callable[[], float] = time.time
    ) -> None:
        self._data_dir = data_dir
        self._clock = clock
        self._always = always
        self._content = BackgroundRead(data_dir / TOKENS_FILE, self._read)
        self._uses = dict(read_uses(data_dir))
        self._writing: threading.Thread | None = None

    async def refresh(self) -> None:
        """Reads the file again if it has changed."""
        await self._content.refresh()

    @property
    def wanted(self) -> bool:
        """Whether clients need a key.

        Once there was a file of tokens, good or not, they do until the node's end: neither the last
        token's revocation nor a folder that is gone may let everybody in.
        """
        return self._content.value.wanted

    @property
    def trouble(self) -> str:
        """Why no token is accepted, though there is a file of them; empty where that is well."""
        return self._content.value.trouble

    def is_shown(self, given: Iterable[bytes]) -> bool:
        """Whether one of them is a token."""
        return bool(self._shown(given))

    def cache_salt(self, given: Iterable[bytes]) -> bytes:
        """8 bytes that stand for the first of them that is a token, empty where none is.

        What a prompt leaves in caches is shared by requests of one salt: holders of different
        tokens do not learn each other's prompts from `cached_tokens`. It goes to runners, which
        are told neither a token nor its digest: that keys the hash, and 8 bytes do not give it
        back.
        """
        shown = self._shown(given)
        key = bytes.fromhex(shown[0].sha256) if shown else b""
        return hmac.digest(key, b"exo-node prefix cache", "sha256")[:8] if key else b""

    def _shown(self, given: Iterable[bytes]) -> list[StoredToken]:
        """The tokens among them. All are compared with all, in constant time each."""
        digests = [digest(each) for each in given]
        shown = [
            stored
            for stored in self._content.value.tokens
            if any([hmac.compare_digest(stored.sha256, each) for each in digests])
        ]
        for stored in shown:
            self._note_use(stored)
        return shown

    def _read(self, before: _Content | None) -> _Content:
        before, state = before or _Content(wanted=self._always), self._look()
        if state == before.state:
            return before
        try:
            tokens = read_tokens(self._data_dir)
        except InvalidSettings as fault:
            if fault.message != before.trouble:
                _LOG.error("%s", fault.message)
            return _Content(state, wanted=True, trouble=fault.message)
        return _Content(state, tokens or (), wanted=before.wanted or tokens is not None)

    def _look(self) -> _State | str:
        """A file that replaces another differs in one of these."""
        try:
            found = (self._data_dir / TOKENS_FILE).lstat()
        except OSError as fault:
            return os.strerror(fault.errno or 0)
        return (
            found.st_ino,
            found.st_size,
            found.st_mtime_ns,
            found.st_ctime_ns,
            found.st_mode,
            found.st_uid,
        )

    def _note_use(self, token: StoredToken) -> None:
        now = int(self._clock())
        # A clock that was set back must not silence this for the difference.
        if 0 <= now - self._uses.get(token.id, -_USE_S) < _USE_S:
            return
        known = {each.id for each in self._content.value.tokens}
        self._uses = {id: at for id, at in self._uses.items() if id in known} | {token.id: now}
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
