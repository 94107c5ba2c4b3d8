"""What a request may ask of a model: tokens within its context, ids within its vocabulary."""

from dataclasses import dataclass

from ...mtp.types import Sampling
from ...placement.errors import ContextLengthExceeded, InvalidRequest


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Of one loaded model."""

    context_length: int
    vocabulary: int

    def budget(self, prompt_tokens: int, max_tokens: int) -> int:
        """The number of tokens to generate at most; `max_tokens` 0 means up to the context's end.

        Raises ContextLengthExceeded, and InvalidRequest for a prompt of no tokens.
        """
        if prompt_tokens == 0:
            raise InvalidRequest("the prompt has no tokens", param="messages")
        room = self.context_length - prompt_tokens
        if room < 1 or max_tokens > room:
            raise ContextLengthExceeded(
                f"the prompt has {prompt_tokens} tokens and max_tokens asks for {max_tokens}, but "
                f"this model's context holds {self.context_length}; shorten the messages "
                "or lower max_tokens",
                param="messages" if room < 1 else "max_tokens",
            )
        return max_tokens or room

    def checked(self, sampling: Sampling) -> Sampling:
        """Raises InvalidRequest for a logit_bias on an id that the model does not have."""
        for token, _ in sampling.penalties.logit_bias:
            if token >= self.vocabulary:
                raise InvalidRequest(
                    f"logit_bias names token {token}, and this model has {self.vocabulary}",
                    param="logit_bias",
                )
        return sampling
