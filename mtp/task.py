"""What one generation is to compute."""

from collections.abc import Sequence
from dataclasses import dataclass

from .schedule import prefill_ends
from .types import Round


@dataclass(frozen=True, slots=True)
class Task:
    """What to generate. `replay` holds the rounds of an earlier attempt: rebuilt, not emitted.

    `top_logprobs` None: rounds carry no log-probabilities; else each token's and so many others.
    `turn_ends`: tokens behind which a forward over the prompt may end; see `schedule`.
    `rebuild_rows`: `replay` is rebuilt by forwards of so many rows, of which it was measured that
    they give what single steps do; 0: by forwards of as many rows as it records.
    """

    prompt: Sequence[int]
    max_tokens: int
    prefill_chunk: int
    replay: Sequence[Round] = ()
    top_logprobs: int | None = None
    turn_ends: frozenset[int] = frozenset()
    rebuild_rows: int = 0

    @property
    def prefill_ends(self) -> list[int]:
        return prefill_ends(self.prompt, self.prefill_chunk, self.turn_ends)
