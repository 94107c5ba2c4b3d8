"""The context of a placement whose request names none: as long as memory allows."""

from bisect import bisect_left
from collections.abc import Callable

from .candidates import Candidate, PlacementTask
from .cost import ModelSizes
from .options import DEFAULT_CONTEXT, PlanOptions, usual_context

STEP = 16_384
"""Tokens by which a context grows: free memory that differs a little changes nothing."""
LEAST = 4096
"""Tokens below which no context is shortened that was not requested."""
SHARE = 2
"""A context beyond DEFAULT_CONTEXT takes at most 1/SHARE of the memory that a node has left."""


def fitting_context(below: int, fits: Callable[[int], bool]) -> int:
    """The longest context under `below` tokens that fits, of 512, 1,024, 2,048 and the multiples
    of LEAST, or 0 if none of them fits."""
    steps = (512, 1024, 2048, *range(LEAST, below, LEAST))
    contexts = [0, *(step for step in steps if step < below)]
    return contexts[bisect_left(contexts, True, lo=1, key=lambda each: not fits(each)) - 1]


def longest_context(task: PlacementTask, chosen: Candidate, options: PlanOptions) -> int:
    """Tokens of KV for `chosen`, which was planned with `task.limits.context`.

    A requested context stays as it is, and so does a shortened one. Otherwise the model's own
    context, or as many tokens as leave every node half of the memory that the plan did not take,
    for other models.
    """
    planned, most = task.limits.context, task.card.context_length
    shortened = planned < usual_context(task.card)
    if options.context is not None or options.frugal or shortened:
        return planned
    longer = [*range(planned + STEP - planned % STEP, most, STEP), most]
    return max((each for each in longer if _fits(task, chosen, each)), default=planned)


def context_reason(task: PlacementTask, chosen: Candidate, options: PlanOptions) -> str:
    """The chosen context for a person; empty for the usual context or less."""
    most = task.card.context_length
    is_longer = task.limits.context == DEFAULT_CONTEXT < most
    if options.context is not None or options.frugal or not is_longer:
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
