"""The API tokens as a node knows them: read again whenever their file has changed."""

import hmac
import logging
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from ...placement.errors import InvalidSettings
from .token_file import (
    TOKENS_FILE,
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


class ApiTokens:
    """The tokens of one data folder.

    `always`: clients need a key also where no token was ever made, as on a node that listens beyond
    loopback. Not safe for threads: requests come on one loop.
    """

    def __init__(
        self, data_dir: Path, *, always: bool = False, clock: Callable[[], float] = time.time
    ) -> None:
        self._data_dir = data_dir
        self._clock = clock
        self._wanted = always
        self._state: _State | str | None = None
        self._trouble = ""
        self._tokens: tuple[StoredToken, ...] = ()
        self._uses = dict(read_uses(data_dir))

    @property
    def wanted(self) -> bool:
        """Whether clients need a key.

        Once there was a file of tokens, good or not, they do until the node's end: neither the last
        token's revocation nor a folder that is gone may let everybody in.
        """
        self._refresh()
        return self._wanted

    @property
    def trouble(self) -> str:
        """Why no token is accepted, though there is a file of them; empty where that is well."""
        self._refresh()
        return self._trouble

    def is_shown(self, given: Iterable[bytes]) -> bool:
        """Whether one of them is a token. All are compared with all, in constant time each."""
        self._refresh()
        digests = [digest(each) for each in given]
        shown = [
            stored
            for stored in self._tokens
            if any([hmac.compare_digest(stored.sha256, each) for each in digests])
        ]
        for stored in shown:
            self._note_use(stored)
        return bool(shown)

    def _refresh(self) -> None:
        state = self._look()
        if state == self._state:
            return
        self._state = state
        try:
            tokens = read_tokens(self._data_dir)
        except InvalidSettings as fault:
            self._tokens, self._wanted = (), True
            if fault.message != self._trouble:
                _LOG.error("%s", fault.message)
            self._trouble = fault.message
            return
        self._trouble = ""
        self._tokens = tokens or ()
        self._wanted = self._wanted or tokens is not None

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
        known = {each.id for each in self._tokens}
        self._uses = {id: at for id, at in self._uses.items() if id in known} | {token.id: now}
        try:
            write_uses(self._data_dir, self._uses)
        except OSError as fault:
            _LOG.warning("the last use of API tokens is not written: %s", fault.strerror)
