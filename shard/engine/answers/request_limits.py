"""Limits of a request: tokens within the model's context, ids within its vocabulary."""

from dataclasses import dataclass
from typing import Final

from ....mtp.types import Sampling
from ....placement.errors import PROMPT, ContextLengthExceeded, InvalidRequest

_RANGES: Final = (
    ("temperature", 0.0, 100.0),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("xtc_probability", 0.0, 1.0),
    ("xtc_threshold", 0.0, 0.5),
)


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """The limits of requests to one loaded model."""

    context_length: int
    vocabulary: int

    def budget(self, prompt_tokens: int, max_tokens: int) -> int:
        """The number of tokens to generate at most: `max_tokens`, or up to the context's end.

        `max_tokens` 0 stands for no limit. Raises ContextLengthExceeded for a prompt that leaves no
        room, in the two sentences of Anthropic's API, because its clients read the numbers and
        shorten the conversation; and InvalidRequest for a prompt of no tokens.
        """
        if prompt_tokens == 0:
            raise InvalidRequest("the prompt has no tokens", param=PROMPT)
        room = self.context_length - prompt_tokens
        if room < 0:
            reason = f"prompt is too long: {prompt_tokens} tokens > {self.context_length} maximum"
            raise ContextLengthExceeded(f"{reason}; shorten it", param=PROMPT)
        if room == 0:
            raise ContextLengthExceeded(
                "input length and `max_tokens` exceed context limit: "
                f"{prompt_tokens} + {max_tokens or 1} > {self.context_length}; shorten the "
                "prompt, since not even one more token fits",
                param=PROMPT,
            )
        return min(max_tokens or room, room)

    def checked(self, sampling: Sampling) -> Sampling:
        """Returns `sampling`. Raises InvalidRequest for a number out of range, and for a logit_bias
        on an id that the model does not have.

        The HTTP API checks its own clients' numbers, but requests of other nodes arrive unchecked.
        """
        for name, least, most in _RANGES:
            if not least <= getattr(sampling, name) <= most:
                raise InvalidRequest(f"{name} must be {least:g} to {most:g}", param=name)
        if sampling.repetition_penalty <= 0:
            raise InvalidRequest(
                "repetition_penalty must be more than 0", param="repetition_penalty"
            )
        for token, _ in sampling.logit_bias:
            if token >= self.vocabulary:
                raise InvalidRequest(
                    f"logit_bias names token {token}, and this model has {self.vocabulary}",
                    param="logit_bias",
                )
        return sampling
