"""The text about joining on the node's terminal: one block, printed when it changes."""

from collections import Counter
from collections.abc import Sequence

from ..machine.own_command import own_command
from .handshake import PeerIdentity, spaced

_NAMED = 6
"""Nodes that the block names."""


def notice(
    own: PeerIdentity, hosts: Sequence[PeerIdentity], guests: Sequence[PeerIdentity], code: str
) -> str:
    """The block of a node that asks the clusters of `hosts` and lets `guests` in.

    `code`: the digits that it shows. Empty where it neither asks nor is asked.
    """
    parties = {each.node: each for each in (*hosts, *guests) if each.node != own.node}
    counts = Counter([own.name, *(each.name for each in parties.values())])

    def named(each: PeerIdentity) -> str:
        return each.name if counts[each.name] == 1 else f"{each.name} ({each.node[:8]})"

    others = [*map(named, parties.values())]
    if not others:
        return ""
    more = f" and {len(others) - _NAMED} more" if len(others) > _NAMED else ""
    lines = [f"Other nodes here: {', '.join(others[:_NAMED])}{more}."]
    if hosts:
        # With its id: an impostor of its name may ask beside it, which only the others see.
        who = f"{own.name}, {own.node[:8]}"
        lines += [f"To let this one ({who}) in, run there:  exo-node approve {spaced(code)}"]
    if guests:
        lines += [f"To let one of them in here:  {own_command()} approve DIGITS NAME"]
        lines += ["  with the digits that it shows itself"]
    return "\n".join(lines)


class JoinNotice:
    """Decides when the block is printed: once it stood for two looks, and not twice."""

    def __init__(self) -> None:
        self._last = ""
        self._printed = ""

    def due(self, block: str) -> str:
        """The text to print after a look at `block`; empty for none."""
        is_stable, self._last = block == self._last, block
        if not is_stable or block == self._printed:
            return ""
        self._printed = block
        return block
