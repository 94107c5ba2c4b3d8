"""The token that proves the node's own user; other users of the machine reach loopback too.

It is in the data folder, which only its owner reads. The `exo-node` command sends it; a browser
gets a session derived from it, in exchange for a ticket that serves once. The page stores the
session for its own origin and sends it as a header: cookies would go to every port of the host.
"""

import hmac
import re
import secrets
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from ...placement.errors import InvalidRequest, InvalidSettings
from ..machine.private_files import read_or_create

TOKEN_FILE: Final = "local.token"
TOKEN_HEADER: Final = "x-exo-token"
TICKET_S: Final = 300.0
_MAX_TICKETS: Final = 16
_BYTES: Final = 32
_TOKEN: Final = re.compile(rf"[0-9a-f]{{{2 * _BYTES}}}")


class LocalToken:
    """The token of one data folder, and its unused tickets."""

    def __init__(self, text: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.text: Final = text
        self._session = hmac.digest(text.encode(), b"exo-node dashboard session v1", "sha256").hex()
        self._clock = clock
        self._tickets: dict[str, float] = {}

    @classmethod
    def load(cls, data_dir: Path) -> "LocalToken":
        """Reads the token, or creates it. Raises InvalidSettings."""
        path = data_dir / TOKEN_FILE
        fresh = secrets.token_hex(_BYTES).encode() + b"\n"
        text = read_or_create(path, fresh).decode("ascii", "replace").strip()
        if not _TOKEN.fullmatch(text):
            raise InvalidSettings(
                f"{path} is damaged; remove it and the node makes a new one", param=str(path)
            )
        return cls(text)

    def accepts(self, candidates: Iterable[bytes]) -> bool:
        """Whether one of the candidates is the token or a session; in constant time each."""
        secret_texts = (self.text.encode(), self._session.encode())
        return any([hmac.compare_digest(each, s) for each in candidates for s in secret_texts])

    def ticket(self) -> str:
        """Creates a ticket for one `redeem` within TICKET_S."""
        while len(self._tickets) >= _MAX_TICKETS:
            del self._tickets[next(iter(self._tickets))]
        ticket = secrets.token_urlsafe(24)
        self._tickets[ticket] = self._clock() + TICKET_S
        return ticket

    def redeem(self, ticket: str) -> str:
        """Returns the session. Raises InvalidRequest for a used, expired or unknown ticket."""
        if self._tickets.pop(ticket, 0.0) <= self._clock():
            raise InvalidRequest(
                "this link was used before or is too old; `exo-node dashboard` prints another",
                param="ticket",
            )
        return self._session


def read_token(data_dir: Path) -> str | None:
    """Reads the token of the node on that folder; None where there is none that can be read.

    A damaged one is None as well: other text may be no valid value of a header.
    """
    try:
        text = (data_dir / TOKEN_FILE).read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return None
    return text if _TOKEN.fullmatch(text) else None
