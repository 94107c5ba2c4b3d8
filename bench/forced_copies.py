"""Copies of a fixed length, for benches and tests: no measurement decides about them."""

from exo_node.mtp.drafting.acceptance import CopyEvidence
from exo_node.mtp.drafting.costs import CostTable, Form
from exo_node.mtp.drafting.lookup import Resumed
from exo_node.mtp.drafting.lookup_drafts import PromptLookup
from exo_node.mtp.drafting.round_policy import RoundPolicy
from exo_node.shard.engine.answers.lookup_control import LookupControl
from exo_node.shard.engine.request import Parameters


class FixedLength(CopyEvidence):
    """Always the same number of tokens, where the last ones occurred before."""

    def add(self, match_length: int, *, is_right: bool, resumed: Resumed = 0) -> None:
        del match_length, is_right, resumed

    def reached(self, match_length: int, count: int, *, resumed: Resumed = 0) -> list[float]:
        del match_length, resumed
        return [1.0] * min(count, self.longest)


class EqualCosts(CostTable):
    """All rounds cost the same."""

    def seconds(self, form: Form) -> float:
        del form
        return 1.0


def allow_always(policy: RoundPolicy, length: int) -> RoundPolicy:
    """Lets all requests copy `length` tokens wherever their evidence is that they stand."""
    policy.costs = EqualCosts()
    policy.allow([length], {length: 1.0}, {length: 0.0})
    policy.allow_shared([length], {(2, length): 1.0}, length)
    return policy


def force(control: LookupControl, evidence: FixedLength) -> None:
    """Gives copies of that length to all requests of an engine that may copy."""

    def lookup(request: Parameters) -> PromptLookup | None:
        return None if control.reason(request) else PromptLookup(request.prompt, evidence)

    control.off_reason = control.shared_reason = ""
    _ = allow_always(control.policy, evidence.longest)
    control.lookup = lookup
