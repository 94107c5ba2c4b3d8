"""Copies of a fixed length, for benches and tests: no measurement decides about them."""

from dataclasses import dataclass

from exo_node.mtp.drafting.lookup import Resumed
from exo_node.mtp.drafting.lookup_drafts import PromptLookup
from exo_node.mtp.drafting.lookup_length import LengthPolicy
from exo_node.shard.engine.answers.lookup_control import LookupControl
from exo_node.shard.engine.request import Parameters


@dataclass(frozen=True, slots=True)
class FixedLength:
    """Always the same number of tokens, where the last ones occurred before."""

    longest: int

    def choose(self, match_length: int, limit: int, position: int, *, resumed: Resumed = 0) -> int:
        del match_length, position, resumed
        return self.longest if limit >= self.longest else 0

    def reached(self, match_length: int, count: int, *, resumed: Resumed = 0) -> list[float]:
        del match_length, resumed
        return [1.0] * min(count, self.longest)

    def observe(self, match_length: int, *, is_right: bool, resumed: Resumed = 0) -> None:
        del match_length, is_right, resumed

    def learn_copy(self, length: int, position: int, seconds: float) -> None:
        del length, position, seconds

    def learn_other(self, drafted: int, tokens: int, position: int, seconds: float) -> None:
        del drafted, tokens, position, seconds


def force(control: LookupControl, policy: LengthPolicy) -> None:
    """Gives this policy to all requests of an engine that may copy."""

    def lookup(request: Parameters) -> PromptLookup | None:
        return None if control.reason(request) else PromptLookup(request.prompt, policy)

    control.off_reason = control.shared_reason = ""
    control._lengths = (policy.longest,)  # pyright: ignore[reportPrivateUsage]
    control.policy.allow([policy.longest], None, policy.longest)
    control.lookup = lookup
