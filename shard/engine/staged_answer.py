"""Plain decoding over several stages, whose logits come from other nodes.

Between rounds every stage holds prompt + emitted - 1 rows: the last token's row is written by the
next forward, whose id travels with it.
"""

from collections.abc import Sequence
from itertools import pairwise

import mlx.core as mx

from ...mtp.finite import NO_TOKEN, NotFinite
from ...mtp.logprobs import Scores, score
from ...mtp.seams import Want, as_ids, as_row
from ...mtp.steps import Prefilled, Rebuilt, Steps
from ...mtp.types import FinishReason, Forward, Round
from ..pipeline.verifier import PipelineVerifier
from .executor import REPORT_EVERY
from .request import Request


class StagedAnswer:
    """One answer; `steps()` drives it to its end. Runs on the compute thread."""

    def __init__(self, request: Request, verifier: PipelineVerifier) -> None:
        self._request = request
        self._verifier = verifier

    def steps(self) -> Steps:
        """Yields what happens; returns why the answer ended. Raises NotFinite, PeerLost."""
        reason = yield from self._begin()
        while reason is None:
            start = self._verifier.position
            token = as_row([self._request.token])
            block = yield from self._verifier.forward(token, want="all")
            made, reason = self._emitted(block.logits, Forward(start, 1, block.batch))
            yield made
        return reason

    def _begin(self) -> Steps:
        """The prompt, and the rounds of an earlier attempt or the first token."""
        prompt, ends = self._request.prompt, self._request.ends
        held = self._verifier.position  # of a prefix that an earlier request read
        yield Prefilled(held, len(prompt))
        for start, end in pairwise((held, *(end for end in ends if end > held))):
            is_last = end == len(prompt)
            want: Want = "last" if is_last and not self._request.log else "none"
            block = yield from self._verifier.forward(as_row(prompt[start:end]), want=want)
            if not is_last:
                mx.eval(self._verifier.arrays())
                mx.clear_cache()
            yield Prefilled(end, len(prompt))
            if is_last and self._request.log:
                return (yield from self._rebuild())
            if is_last:
                made, reason = self._emitted(block.logits, Forward(start, end - start))
                yield made
                return reason
        raise ValueError("the prompt is empty")

    def _emitted(self, logits: mx.array, forward: Forward) -> tuple[Round, FinishReason | None]:
        """The target's next token from its logits (1, V), read, and why the answer ends with it."""
        request, position = self._request, self._verifier.position
        token = request.sampler.token(logits, position)
        scores = self._scores(logits, token)
        ids = as_ids(token)
        if NO_TOKEN in ids:
            raise NotFinite(position)
        request.sampler.commit(token)
        reason = request.count(ids[0])
        logprobs = () if scores is None else scores.read(ids)
        return Round(tuple(ids), 0, 0, forward, logprobs), reason

    def _scores(self, logits: mx.array, token: mx.array) -> Scores | None:
        top = self._request.top_logprobs
        if top is None:
            return None
        return score(self._request.sampler.target_logprobs(logits, None), token, top)

    def _rebuild(self) -> Steps:
        """The log once more. Nobody reads its logits, so its forwards follow each other at once."""
        request = self._request
        first, *rounds = request.log
        request.sampler.commit(as_row(first.tokens))
        reason, _ = request.cut(list(first.tokens))
        total = len(request.log)
        yield Rebuilt(1, total)
        for start in range(0, len(rounds), REPORT_EVERY):
            some = rounds[start : start + REPORT_EVERY]
            if all(recorded.forward.rows == len(recorded.tokens) for recorded in some):
                self._repeat(some)
            else:
                for before, recorded in zip([None, *some], some, strict=False):
                    last = request.token if before is None else before.tokens[-1]
                    yield from self._repeat_with_drafts(last, recorded)
            for recorded in some:
                request.sampler.commit(as_row(recorded.tokens))
                reason, _ = request.cut(list(recorded.tokens))
            yield Rebuilt(1 + start + len(some), total)
        return reason

    def _repeat(self, rounds: Sequence[Round]) -> None:
        """Rounds of which nothing was rolled back, all at once."""
        tokens = [token for recorded in rounds for token in recorded.tokens]
        schedule = [recorded.forward.rows for recorded in rounds]
        self._verifier.repeat(as_row([self._request.token, *tokens[:-1]]), schedule)
        mx.eval(self._verifier.arrays())

    def _repeat_with_drafts(self, last: int, recorded: Round) -> Steps:
        """A round of a whole model that drafted, by a forward of as many rows: they chose the
        kernels. What the rejected rows held cannot matter."""
        rows, kept = recorded.forward.rows, len(recorded.tokens)
        ids = [last, *recorded.tokens[:-1], *([0] * (rows - kept))]
        _ = yield from self._verifier.forward(as_row(ids), want="none")
        if kept < rows:
            self._verifier.rollback(rows - kept)
        mx.eval(self._verifier.arrays())
        return None
