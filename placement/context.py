"""The context of a placement whose request names none: as long as memory allows."""

from .candidates import Candidate, PlacementTask
from .cost import ModelSizes
from .options import DEFAULT_CONTEXT, PlanOptions

STEP = 16_384
"""Tokens by which a context grows: free memory that differs a little changes nothing."""
SHARE = 2
"""A context beyond DEFAULT_CONTEXT takes at most 1/SHARE of the memory that a node has left."""


def longest_context(task: PlacementTask, chosen: Candidate, options: PlanOptions) -> int:
    """Tokens of KV for `chosen`, which was planned with `task.limits.context`.

    A requested context stays as it is. Otherwise the model's own context, or as many tokens as
    leave every node half of the memory that the plan did not take, for other models.
    """
    planned, most = task.limits.context, task.card.context_length
    if options.context is not None or options.frugal:
        return planned
    longer = [*range(planned + STEP - planned % STEP, most, STEP), most]
    return max((each for each in longer if _fits(task, chosen, each)), default=planned)


def context_reason(task: PlacementTask, chosen: Candidate, options: PlanOptions) -> str:
    """The chosen context for a person; empty for a model whose context is short anyway."""
    most = task.card.context_length
    if options.context is not None or options.frugal or most <= DEFAULT_CONTEXT:
        return ""
    context = longest_context(task, chosen, options)
    if context == most:
        return f"there is room for the model's whole context of {most:,} tokens"
    return (
        f"there is room for a context of {context:,} of the model's {most:,} tokens: more would "
        "take over half of the memory that is left"
    )


def _fits(task: PlacementTask, chosen: Candidate, context: int) -> bool:
    before, after = task.sizes, ModelSizes.of(task.card, context)
    for node, stage in zip(chosen.nodes, chosen.stages, strict=True):
        part = (stage.first_layer, stage.end_layer)
        head = {"generator": stage.first_layer == 0, "mtp": chosen.speedup > 0}
        need = before.need(*part, **head)
        if after.need(*part, **head) - need > (node.memory_bytes - need) // SHARE:
            return False
    return True
