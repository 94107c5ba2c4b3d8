"""Rebuilds the state of an earlier attempt: its tokens once more, whose rounds are known."""

from collections.abc import Callable, Generator, Sequence

import mlx.core as mx

from .answer import Answer
from .sampler import Sampler
from .seams import Block, Drafter, RemoteVerifier, Verifier, Wait, Want, as_ids, as_row
from .steps import Rebuilt, Step
from .task import Task
from .types import FinishReason, Round

REPORT_EVERY = 16
"""Rounds rebuilt between two reports: other requests have their turn there."""


class Rebuild:
    """Repeats recorded rounds by forwards of as many rows, so that the same kernels run.

    Where rows are known not to depend on that, several rounds share a forward. Nobody reads their
    logits: over several nodes the forwards follow each other at once.
    """

    def __init__(
        self,
        task: Task,
        verifier: Verifier,
        remote: RemoteVerifier | None,
        drafter: Drafter,
        sampler: Sampler,
        answer: Answer,
        commit: Callable[[Block, mx.array, int, int], None],
    ) -> None:
        """As `Generation` has them; `commit(block, tokens, rows, kept)` ends a round."""
        self._task = task
        self._verifier = verifier
        self._remote = remote
        self._drafter = drafter
        self._sampler = sampler
        self._answer = answer
        self._commit = commit

    def steps(
        self, last: mx.array | None
    ) -> Generator[Step, None, tuple[mx.array, FinishReason | None]]:
        """After the prompt, whose last hidden is `last`; None where nothing drafts.

        Returns the last emitted token (1,) and why the answer ended, if it did.
        """
        first, *rounds = self._task.replay
        reason = self._answer.count(first.tokens[-1])
        token = as_row(first.tokens)
        self._sampler.commit(token)
        self._drafter.observe(last, token)
        yield Rebuilt(1, len(rounds) + 1)
        for start in range(0, len(rounds), REPORT_EVERY):
            some = rounds[start : start + REPORT_EVERY]
            yield from self._repeat_rounds(token, some)
            for recorded in some:
                reason, _ = self._answer.cut(list(recorded.tokens))
            token = _last(some[-1])
            yield Rebuilt(1 + start + len(some), len(rounds) + 1)
        return _last(self._task.replay[-1]), reason

    def _repeat_rounds(
        self, token: mx.array, rounds: Sequence[Round]
    ) -> Generator[Wait, None, None]:
        whole = all(recorded.forward.rows == len(recorded.tokens) for recorded in rounds)
        if self._remote is not None and whole:
            self._send_on(self._remote, token, rounds)
            return
        if self._remote is None and self._task.rebuild_rows:
            yield from self._repeat_together(token, rounds)
            return
        for before, recorded in zip([token, *map(_last, rounds)], rounds, strict=False):
            yield from self._repeat_round(before, recorded)

    def _send_on(self, remote: RemoteVerifier, token: mx.array, rounds: Sequence[Round]) -> None:
        """Rounds of which nothing was rolled back, all at once."""
        tokens = [token for recorded in rounds for token in recorded.tokens]
        schedule = [recorded.forward.rows for recorded in rounds]
        remote.repeat(as_row([*as_ids(token), *tokens[:-1]]), schedule)
        self._sampler.commit(as_row(tokens))
        mx.eval(remote.arrays())

    def _repeat_together(
        self, token: mx.array, rounds: Sequence[Round]
    ) -> Generator[Wait, None, None]:
        """Without the rows that were rejected, and with no more forwards than needed."""
        told = [each for recorded in rounds for each in recorded.tokens]
        ids = [*as_ids(token), *told[:-1]]
        for begin in range(0, len(told), self._task.rebuild_rows):
            end = begin + self._task.rebuild_rows
            self._drafter.catch_up()
            block = yield from self._verifier.forward(as_row(ids[begin:end]), want="all")
            after = as_row(told[begin:end])
            self._commit(block, after, after.shape[0], after.shape[0])
            mx.eval(self._verifier.arrays(), self._drafter.arrays())

    def _repeat_round(self, token: mx.array, recorded: Round) -> Generator[Wait, None, None]:
        rows, kept = recorded.forward.rows, len(recorded.tokens)
        # What the rejected rows held cannot matter: only their number chose the kernels.
        padding = [0] * (rows - kept)
        ids = [*as_ids(token), *recorded.tokens[:-1], *padding]
        want: Want = "all" if self._remote is None else "none"
        if recorded.drafted:
            self._drafter.catch_up()  # the head's rows, too, by the forwards of before
        block = yield from self._verifier.forward(as_row(ids), want=want)
        self._commit(block, as_row(recorded.tokens), rows, kept)
        mx.eval(self._verifier.arrays(), self._drafter.arrays())


def _last(recorded: Round) -> mx.array:
    """The token that the next round begins with."""
    return as_row(recorded.tokens[-1:])
