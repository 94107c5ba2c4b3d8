"""Drafts of one request that are copied from its own prompt and answer."""

from array import array
from collections.abc import Sequence
from typing import Final

from .lookup import LONGEST_MATCH, NO_MATCH, Match, SuffixIndex
from .lookup_length import LengthPolicy
from .types import Round

READ_AT_ONCE: Final = 16_384
"""Tokens of a prompt that are indexed between two rounds: a few milliseconds of work."""


class PromptLookup:
    """The tokens that followed the longest earlier occurrence of a request's last ones.

    Only committed tokens are added, so a rejected draft or a resumed answer leaves no trace.
    """

    def __init__(self, prompt: Sequence[int], policy: LengthPolicy) -> None:
        self.policy = policy
        self._index = SuffixIndex(len(prompt))
        self._waiting = array("i", prompt)
        """Tokens that are not indexed yet."""
        self._match = NO_MATCH

    def push(self, token: int) -> None:
        """Adds the answer's next token, and records whether the copy would have been right."""
        if self._waiting:
            self._waiting.append(token)
            return
        length, place = self._match
        is_right = length > 0 and self._index[place] == token
        if length:
            self.policy.observe(length, is_right=is_right)
        self._index.extend((token,))
        # A longer match would have been longer before this token, too.
        self._match = (
            Match(min(length + 1, LONGEST_MATCH), place + 1) if is_right else self._index.find()
        )

    def length(self, limit: int, position: int) -> int:
        """Tokens to copy in the next round, behind `position` rows; 0: none, `limit` at most."""
        _ = self.read()
        if not self._match.length or limit <= 0:
            return 0
        return self.policy.choose(self._match.length, limit, position)

    def reached(self, limit: int) -> list[float]:
        """Chances that the first 1, 2, … tokens of the copy stand, `limit` at most; none without an
        earlier occurrence, and until `read` has indexed the whole prompt."""
        if not self._match.length or limit <= 0:
            return []
        return self.policy.reached(self._match.length, limit)

    def tokens(self, length: int) -> list[int]:
        """The next `length` tokens of the copy."""
        return self._index.continuation(self._match.place, length)

    def learn(self, round_: Round, seconds: float) -> None:
        """Records the cost of a round that the request shared with no other."""
        start = round_.forward.position
        if round_.is_copied:
            self.policy.learn_copy(round_.drafted, start, seconds)
        else:
            self.policy.learn_other(round_.drafted, len(round_.tokens), start, seconds)

    @property
    def match(self) -> Match:
        """The longest earlier occurrence of the last tokens."""
        return self._match

    def read(self) -> bool:
        """Indexes a part of the prompt. Returns whether any was left."""
        if not self._waiting:
            return False
        self._index.extend(self._waiting[:READ_AT_ONCE])
        self._waiting = self._waiting[READ_AT_ONCE:]
        if not self._waiting:
            self._match = self._index.find()
        return True
