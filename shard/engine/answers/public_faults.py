"""The error that the reader of an answer gets for an error of its computation."""

from collections.abc import Callable

from ....mtp.finite import DraftNotFinite, NotFinite
from ....mtp.grammar import GrammarMatcher
from ....placement.errors import InsufficientMemory, InvalidRequest, NumericError, StateLost
from ....placement.gpu_faults import gpu_fault
from ...model.tensors import numeric_error


def public_fault(
    fault: Exception,
    grammar: GrammarMatcher | None,
    dtype: str,
    *,
    is_whole: bool,
    clear_prefixes: Callable[[], None],
) -> Exception:
    """Translates `fault`. `is_whole`: whether this node has the whole model.

    Cached prefixes may hold the numbers that are not finite, so they are cleared.
    """
    grammar_fault = grammar.failed if grammar is not None else ""
    if grammar_fault and isinstance(fault, NotFinite | DraftNotFinite | StateLost):
        return InvalidRequest(grammar_fault)
    if isinstance(fault, NotFinite | NumericError):
        clear_prefixes()
    if isinstance(fault, NotFinite):
        return numeric_error(fault.position, dtype, alone=is_whole)
    if isinstance(fault, DraftNotFinite):
        # Its entry node has every round that was delivered: the next attempt shows whether the
        # target or a draft is at fault.
        return StateLost(str(fault))
    if gpu_fault(str(fault)) == "memory":
        return InsufficientMemory(
            f"the computer ran out of memory in the middle of this answer ({fault}); send a "
            "shorter prompt, load the model with a shorter context, or unload other models"
        )
    return fault
