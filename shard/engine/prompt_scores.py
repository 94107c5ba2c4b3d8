"""Log-probabilities of a prompt's tokens."""

import mlx.core as mx

from ...mtp.logprobs import score
from ...mtp.seams import as_row
from ...mtp.types import Prefilled, TokenLogprobs
from .request import Request
from .step_outcome import StepOutcome


def scored(request: Request, logits: mx.array, begin: int) -> StepOutcome:
    """Progress with the log-probabilities of the tokens after a forward's rows, which begin at
    `begin` and gave `logits` (n, V). In front of them all, the prompt's first token.

    The distribution is the model's own, without the request's penalties and bias.
    """
    prompt, end = request.prompt, request.rows
    following = prompt[begin + 1 : end + 1]
    first = (TokenLogprobs(prompt[0], 0.0),) if begin == 0 else ()
    entries = tuple[TokenLogprobs, ...]()
    if following:
        x = logits[: len(following)].astype(mx.float32)
        x = x - mx.logsumexp(x, axis=-1, keepdims=True)
        entries = score(x, as_row(following), request.top_logprobs or 0).read(following)
    return StepOutcome(request, Prefilled(end, len(prompt), (*first, *entries)))
