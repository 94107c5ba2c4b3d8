"""One request on a stage after the first one, and which blocks may follow its rows."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ...placement.errors import InvalidFrame
from ..pipeline.frames import BlockMember, HiddenBlock
from ..pipeline.link import Key
from .prefixes.borders import PrefillLog
from .prefixes.prompt_path import PromptPath


@dataclass(slots=True, eq=False)
class StageRequest:
    """One request on this stage."""

    key: Key
    used_at: float
    """The time at which a frame of it was last computed."""
    rows: int = 0
    """Committed rows."""
    shares: bool = True
    """Whether its rounds may share forwards: what is measured later changes none of its tokens."""
    has_ended: bool = False
    prefill_log: PrefillLog = field(default_factory=PrefillLog)
    """The forwards over its prompt so far."""
    queried_prefix: PromptPath = field(default_factory=lambda: PromptPath((), ()))
    """The prefix that the first stage asked for, and may begin after."""
    copies: Sequence[int] = ()
    """Lengths that its rounds may copy, once the stages agreed on them."""
    open_rows: int = 0
    """Rows of its last round, if that copied: the next block says how many of them stay."""

    def check(self, member: BlockMember, block: HiddenBlock) -> int:
        """Checks that a block may follow. Returns how many of the `open_rows` stay.

        Raises InvalidFrame naming the field.
        """
        kept_rows = self._kept_rows(member.kept_rows)
        if member.position != self.rows + kept_rows:
            raise InvalidFrame(
                f"hidden.members.position is {member.position} where {self.rows + kept_rows} rows "
                "are committed",
                param="hidden.members.position",
            )
        if self.copies and block.is_round and block.rows - 1 not in (0, *self.copies):
            raise InvalidFrame(
                f"hidden.rows is {block.rows} where the stages agreed on copies of "
                f"{', '.join(map(str, self.copies))} tokens",
                param="hidden.rows",
            )
        return kept_rows

    def _kept_rows(self, kept_rows: int | None) -> int:
        if not self.open_rows and kept_rows is None:
            return 0
        if not self.open_rows or kept_rows is None or kept_rows > self.open_rows:
            value = "absent" if kept_rows is None else str(kept_rows)
            raise InvalidFrame(
                f"hidden.members.kept_rows is {value} where {self.open_rows} rows of request "
                f"{self.key[0]} may be taken back",
                param="hidden.members.kept_rows",
            )
        return kept_rows
