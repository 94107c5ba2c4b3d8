"""Drafts of one request that are copied from its own prompt and answer."""

from array import array
from collections.abc import Sequence
from typing import Final

from .acceptance import CopyEvidence
from .lookup import LONGEST_MATCH, NO_MATCH, RESUMABLE, Match, SuffixIndex

READ_AT_ONCE: Final = 16_384
"""Tokens of a prompt that are indexed between two rounds: a few milliseconds of work."""
FOLLOWED_AT_ONCE: Final = 1024
"""Tokens of a log that are followed between two rounds, each with a search of its own."""


class PromptLookup:
    """The tokens that followed the longest earlier occurrence of a request's last ones.

    Where the answer changes a few tokens of a long copy, the copy resumes after them.

    Only committed tokens are added, so a rejected draft or a resumed answer leaves no trace.
    """

    def __init__(self, prompt: Sequence[int], evidence: CopyEvidence) -> None:
        self.evidence = evidence
        self._index = SuffixIndex(len(prompt))
        self._waiting = array("i", prompt)
        """Tokens of the prompt that are not indexed yet."""
        self._answer = array("i")
        """Tokens of the answer that came meanwhile: one at least, or a whole log."""
        self._match = NO_MATCH
        self._broken, self._since = NO_MATCH, 0
        """The last match that was not right, and tokens since then."""

    def push(self, token: int) -> None:
        """Adds the answer's next token, and records whether the copy would have been right."""
        if self._waiting or self._answer:
            self._answer.append(token)
        else:
            self._follow(token)

    def _follow(self, token: int) -> None:
        length, place, resumed = self._match
        is_right = length > 0 and self._index[place] == token
        if length:
            self.evidence.add(length, is_right=is_right, resumed=resumed)
        self._index.extend((token,))
        if is_right:  # a longer match would have been longer before this token, too
            self._match = Match(min(length + 1, LONGEST_MATCH), place + 1)
            return
        self._since += 1
        if length >= RESUMABLE and not resumed:
            self._broken, self._since = self._match, 0
        match = self._index.find()
        self._match = match if match.length else self._index.resume(self._broken, self._since)

    def reached(self, limit: int) -> list[float]:
        """Chances that the first 1, 2, … tokens of the copy stand, `limit` at most; none without an
        earlier occurrence, and until `read` has indexed the whole prompt."""
        if self._waiting or self._answer or not self._match.length or limit <= 0:
            return []
        length, _, resumed = self._match
        return self.evidence.reached(length, self._texts(limit), resumed=resumed)

    def _texts(self, limit: int) -> int:
        """How many of the copy's next tokens, `limit` at most, are no rows of images."""
        following = self._index.continuation(self._match.place, min(limit, self.evidence.longest))
        return next((n for n, token in enumerate(following) if token < 0), limit)

    def tokens(self, length: int) -> list[int]:
        """The next `length` tokens of the copy."""
        return self._index.continuation(self._match.place, length)

    @property
    def match(self) -> Match:
        """The longest earlier occurrence of the last tokens, but for some that were changed."""
        return self._match

    def read(self) -> bool:
        """Indexes a part of the prompt, or of the answer after it. Returns whether any of the
        prompt was left."""
        was_left = bool(self._waiting)
        if self._waiting:
            self._index.extend(self._waiting[:READ_AT_ONCE])
            self._waiting = self._waiting[READ_AT_ONCE:]
            if self._waiting:
                return True
            self._match = self._index.find()
        tokens, self._answer = self._answer[:FOLLOWED_AT_ONCE], self._answer[FOLLOWED_AT_ONCE:]
        for token in tokens:
            self._follow(token)
        return was_left
