"""The token that tells the node's own user from other users of the machine, who reach loopback too.

It lies in the data folder, which only its owner reads. The `exo-node` command sends it; a browser
gets a session made of it, in exchange for a ticket that serves once. The page keeps the session for
its own origin and sends it as a header: cookies go to every port of a host, whoever listens there.
"""

import hmac
import re
import secrets
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from ...placement.errors import InvalidRequest, InvalidSettings

TOKEN_FILE: Final = "local.token"
TOKEN_HEADER: Final = "x-exo-token"
TICKET_S: Final = 300.0
_MAX_TICKETS: Final = 16
_BYTES: Final = 32
_TOKEN: Final = re.compile(rf"[0-9a-f]{{{2 * _BYTES}}}")


class LocalToken:
    """The token of one data folder, and the tickets that were given out for it."""

    def __init__(self, text: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.text: Final = text
        self._session = hmac.digest(text.encode(), b"exo-node dashboard session v1", "sha256").hex()
        self._clock = clock
        self._tickets: dict[str, float] = {}

    @classmethod
    def load(cls, data_dir: Path) -> "LocalToken":
        """Made on the first start. Raises InvalidSettings."""
        from ..machine.private_files import create_private  # commands read a token without gRPC

        path = data_dir / TOKEN_FILE
        try:
            if not path.exists():
                create_private(path, secrets.token_hex(_BYTES).encode() + b"\n")
            path.chmod(0o600)
            text = path.read_text(encoding="ascii", errors="replace").strip()
        except OSError as fault:
            raise InvalidSettings(
                f"{path} cannot be used: {fault.strerror}; check who owns the data folder",
                param=str(path),
            ) from fault
        if not _TOKEN.fullmatch(text):
            raise InvalidSettings(
                f"{path} is damaged; remove it and the node makes a new one", param=str(path)
            )
        return cls(text)

    def is_shown(self, given: Iterable[bytes]) -> bool:
        """Whether one of them is the token or a session."""
        valid = (self.text.encode(), self._session.encode())
        return any([hmac.compare_digest(each, known) for each in given for known in valid])

    def ticket(self) -> str:
        """Good for one `redeem` within TICKET_S."""
        while len(self._tickets) >= _MAX_TICKETS:
            del self._tickets[next(iter(self._tickets))]
        ticket = secrets.token_urlsafe(24)
        self._tickets[ticket] = self._clock() + TICKET_S
        return ticket

    def redeem(self, ticket: str) -> str:
        """The session. Raises InvalidRequest for a ticket that was used, or is none."""
        if self._tickets.pop(ticket, 0.0) <= self._clock():
            raise InvalidRequest(
                "this link was used before or is too old; `exo-node dashboard` prints another",
                param="ticket",
            )
        return self._session


def read_token(data_dir: Path) -> str | None:
    """The token of the node on that folder; None where there is none, it is another user's, or it
    is damaged: what is no token may not even be a header's value."""
    try:
        text = (data_dir / TOKEN_FILE).read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return None
    return text if _TOKEN.fullmatch(text) else None
