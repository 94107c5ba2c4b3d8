"""Draft, verify, accept, roll back: the whole algorithm, for one request.

Plain decoding is the same loop with no drafts. Between rounds the verifier holds prompt + emitted
- 1 rows: the last token's row is written by the next forward.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import mlx.core as mx

from .chooser import Chooser
from .seams import Block, Drafter, Ending, Verifier, Wait, Want, as_ids, as_row
from .types import FinishReason, Forward, Round

CLEAR_EVERY = 256
"""Tokens between calls of `mx.clear_cache`, as in mlx-lm: buffers of many sizes pile up."""


@dataclass(frozen=True, slots=True)
class Prefilled:
    """Progress through the prompt, in rows."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Task:
    """What to generate. `replay` holds the rounds of an earlier attempt: rebuilt, not emitted."""

    prompt: Sequence[int]
    max_tokens: int
    prefill_chunk: int
    replay: Sequence[Round] = ()


Step = Wait | Prefilled | Round
Steps = Generator[Step, None, FinishReason]


class Generation:
    """One answer in the making; `steps()` drives it to its end."""

    def __init__(
        self, task: Task, verifier: Verifier, drafter: Drafter, chooser: Chooser, ending: Ending
    ) -> None:
        self._task = task
        self._verifier = verifier
        self._drafter = drafter
        self._chooser = chooser
        self._ending = ending
        self._emitted = 0

    def steps(self) -> Steps:
        """Yields what happens; returns why the answer ended. The caches then fit its tokens."""
        logits, last, forward = yield from self._prefill()
        if self._task.replay:
            reason = yield from self._rebuild(last)
            token = as_row(self._task.replay[-1].tokens[-1:])
        else:
            token = self._chooser.token(logits, self._verifier.position)
            self._chooser.commit(token)
            self._drafter.observe(last, token)
            if self._drafter.k == 0 and self._verifier.overlaps:
                return (yield from self._plain(token, forward))
            [first] = as_ids(token)
            reason = self._count(first)
            yield Round((first,), 0, 0, forward)
        while reason is None:
            token, reason = yield from self._round(token)
        return reason

    def _prefill(self) -> Generator[Step, None, tuple[mx.array, mx.array | None, Forward]]:
        """One pass over the prompt: each chunk's hidden also primes the drafter."""
        prompt, chunk = self._task.prompt, self._task.prefill_chunk
        yield Prefilled(0, len(prompt))
        for start in range(0, len(prompt), chunk):
            end = min(start + chunk, len(prompt))
            rows = as_row(prompt[start:end])
            want: Want = "last" if end == len(prompt) else "none"
            block = yield from self._verifier.forward(rows, want=want)
            if end < len(prompt):
                self._drafter.observe(block.hidden, as_row(prompt[start + 1 : end + 1]))
                mx.eval(self._verifier.arrays(), self._drafter.arrays())
                mx.clear_cache()
                yield Prefilled(end, len(prompt))
                continue
            last = block.hidden
            if last is not None and end - start > 1:
                self._drafter.observe(last[:, :-1], as_row(prompt[start + 1 : end]))
                last = last[:, -1:]
            yield Prefilled(end, len(prompt))
            return block.logits, last, Forward(start, end - start)
        raise ValueError("the prompt is empty")

    def _round(
        self, token: mx.array
    ) -> Generator[Step, None, tuple[mx.array, FinishReason | None]]:
        """One verify: K drafts and the committed `token` in, 1 to K + 1 tokens out."""
        start = self._verifier.position
        k = min(self._drafter.k, self._task.max_tokens - self._emitted - 1)
        drafts = self._drafter.draft(k, start + 1) if k > 0 else None
        rows = token if drafts is None else mx.concatenate([token, drafts.tokens])
        block = yield from self._verifier.forward(rows, want="all")
        verdict = self._chooser.judge(block.logits, drafts, start + 1)
        accepted, ids = verdict.read()
        reason, ids = self._cut(ids)
        self._commit(block, verdict.tokens, rows.shape[0], len(ids))
        proposed = 0 if drafts is None else k
        yield Round(tuple(ids), proposed, min(accepted, len(ids)), Forward(start, rows.shape[0]))
        return verdict.tokens[len(ids) - 1 : len(ids)], reason

    def _commit(self, block: Block, tokens: mx.array, rows: int, kept: int) -> None:
        """Leaves `kept` of the block's rows in the caches and tells the drafter of them."""
        if kept < rows:
            self._verifier.rollback(rows - kept)
        self._chooser.commit(tokens[:kept])
        hidden = None if block.hidden is None else block.hidden[:, :kept]
        self._drafter.observe(hidden, tokens[:kept])

    def _plain(self, token: mx.array, forward: Forward) -> Steps:
        """Plain decoding, one forward ahead: its graph is built while the token is computed.

        The forward in flight belongs to a token that ended the answer more often than not only at
        the very end; it is rolled back there.
        """
        while True:
            ahead = self._emitted + 1 < self._task.max_tokens
            upcoming, start = token, self._verifier.position
            if ahead:
                block = yield from self._verifier.forward(token, want="all")
                upcoming = self._chooser.token(block.logits, start + 1)
                self._chooser.commit(upcoming)
                mx.async_eval(upcoming)
            [emitted] = as_ids(token)
            reason = self._count(emitted)
            if reason is not None and ahead:
                self._verifier.rollback(1)
            yield Round((emitted,), 0, 0, forward)
            if reason is not None:
                return reason
            token, forward = upcoming, Forward(start, 1)

    def _rebuild(self, last: mx.array | None) -> Generator[Step, None, FinishReason | None]:
        """Repeats recorded rounds with the same rows, so that the same kernels ran."""
        first, *rounds = self._task.replay
        reason = self._count(first.tokens[-1])
        token = as_row(first.tokens)
        self._chooser.commit(token)
        self._drafter.observe(last, token)
        for recorded in rounds:
            rows, kept = recorded.forward.rows, len(recorded.tokens)
            # What the rejected rows held cannot matter: only their number chose the kernels.
            padding = [0] * (rows - kept)
            ids = [*as_ids(token), *recorded.tokens[:-1], *padding]
            block = yield from self._verifier.forward(as_row(ids), want="all")
            self._commit(block, as_row(recorded.tokens), rows, kept)
            mx.eval(self._verifier.arrays(), self._drafter.arrays())
            reason, _ = self._cut(list(recorded.tokens))
            token = as_row(recorded.tokens[-1:])
        return reason

    def _cut(self, ids: list[int]) -> tuple[FinishReason | None, list[int]]:
        """The ids up to and with the one that plain decoding would have ended at."""
        for count, token in enumerate(ids, 1):
            if (reason := self._count(token)) is not None:
                return reason, ids[:count]
        return None, ids

    def _count(self, token: int) -> FinishReason | None:
        self._emitted += 1
        if self._emitted % CLEAR_EVERY == 0:
            mx.clear_cache()
        ended = self._ending.push(token)
        if ended is None and self._emitted >= self._task.max_tokens:
            return "length"
        return ended
