"""The proofs of joining, driven over a connection: the 20 rounds, and the exchange of --open."""

import secrets
from collections.abc import Callable

from ..placement.errors import DigitsDiffer, Untrusted
from ..proto import peer_pb2 as pb
from .join import Passkey, Role
from .join_open import SECRET_BYTES, SameName
from .join_wire import Line, Refused


async def prove_digits(
    line: Line,
    role: Role,
    transcript: bytes,
    code: str,
    *,
    used: Callable[[], None] = lambda: None,
) -> None:
    """Returns once both sides have proven every bit of the digits.

    `used` is called before the first bit may be told.

    Raises DigitsDiffer, whichever side noticed, Untrusted, PeerLost and Refused.
    """
    passkey = Passkey(role, transcript, code, secrets.token_bytes)
    try:
        while (step := passkey.next) is not None:
            match step:
                case "commit":
                    await line.send(pb.JoinFrame(commitment=passkey.commit()))
                case "meet":
                    passkey.meet((await line.receive("commitment")).commitment)
                case "reveal":
                    await line.send(pb.JoinFrame(opened=passkey.reveal()))
                case "check":
                    used()
                    passkey.check((await line.receive("opened")).opened)
    except Refused as refused:
        if refused.reason == "wrong_code":
            raise DigitsDiffer("the digits did not match") from refused
        raise
    if not passkey.proven:
        raise Untrusted("the digits are not proven")


def begin_exchange(role: Role, transcript: bytes, name: str) -> SameName:
    """This side of one exchange about --open's name."""
    return SameName(role, transcript, name, secrets.token_bytes(SECRET_BYTES))
