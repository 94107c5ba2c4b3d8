"""What the engine needs of a model family to draft and verify; a file for each family beside this.

A new family is such a file, a function that imports it and a line in `_FAMILIES`.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

import mlx.core as mx
from mlx import nn

from .draft_vocabulary import first_rows
from .head import DraftHead, HiddenKind
from .rollback import Swaps
from .weights import HeadSource, HeadUnusable


class Family(Protocol):
    """A loaded model taken apart where multi-token prediction needs it."""

    hidden_kinds: ClassVar[tuple[HiddenKind, ...]]
    """What `hidden` can give, the usual one first."""
    hidden_kind: HiddenKind
    """What `hidden` gives, and so what the head is fed."""
    swaps: ClassVar[Swaps]
    """What `prepare` does to a model."""

    def hidden(self, tokens: mx.array, caches: Sequence[object]) -> mx.array:
        """Ids (1, n) -> (1, n, H), appended to the caches; no logits are computed."""
        ...

    def logits(self, hidden: mx.array) -> mx.array:
        """(1, n, H) of `hidden` -> (1, n, V)."""
        ...

    @property
    def output(self) -> nn.Module:
        """The matrix of `lm_head`: a linear layer, or the embeddings where they are tied."""
        ...

    def lm_head(self, normed: mx.array) -> mx.array:
        """(1, n, H) after a final norm, the backbone's or the head's -> (1, n, V)."""
        ...

    def embed(self, tokens: mx.array) -> mx.array:
        """Ids (1, n) -> (1, n, H)."""
        ...

    def make_head(self) -> Any:
        """A `DraftHead` (and nn.Module) of this family's shape, weights not yet loaded."""
        ...

    def head_parameters(self, source: HeadSource) -> dict[str, mx.array] | HeadUnusable:
        """The checkpoint's tensors as the head's parameters; quantised ones as mlx packs them."""
        ...


def family_of(model: nn.Module, hidden_kind: HiddenKind | None = None) -> Family | None:
    """The family of a loaded mlx-lm model, None where there is no file for it.

    `hidden_kind`, one of the family's `hidden_kinds`, is what its head is fed; None: the usual one.
    """
    made = _class_for(model)
    if made is None:
        return None
    return made(model, hidden_kind or made.hidden_kinds[0])


def prepare(model: nn.Module) -> None:
    """Makes a loaded model's layers able to take rows back and to verify blocks as single rows.

    Instances change class rather than the class its methods: weights stay as they are, and another
    model in the process, or another patch, is not touched.
    """
    made = _class_for(model)
    if made is None:
        return
    for _, module in model.named_modules():
        if stand_in := made.swaps.get(type(module)):
            module.__class__ = stand_in


def draft_logits(
    family: Family, head: DraftHead, vocabulary: int = 0
) -> Callable[[mx.array], mx.array]:
    """(1, n, H) of the head's output -> (1, n, V), or of the first `vocabulary` ids only."""
    lm_head = first_rows(family.output, vocabulary) if vocabulary else family.lm_head
    return lambda output: lm_head(head.read_out(output))


def _class_for(model: nn.Module) -> type[Any] | None:
    found = _FAMILIES.get(type(model).__module__.removeprefix("mlx_lm.models."))
    return found() if found is not None else None


# mlx-lm has over a hundred modules: one is imported when a model of it turns up.


def _qwen35() -> type[Any]:
    from .qwen35 import Qwen35Family

    return Qwen35Family


def _qwen3_next() -> type[Any]:
    from .qwen3_next import Qwen3NextFamily

    return Qwen3NextFamily


def _deepseek_v3() -> type[Any]:
    from .deepseek_v3 import DeepseekV3Family

    return DeepseekV3Family


def _glm4_moe() -> type[Any]:
    from .glm4_moe import Glm4MoeFamily

    return Glm4MoeFamily


_FAMILIES: dict[str, Callable[[], type[Any]]] = {
    "qwen3_5": _qwen35,
    "qwen3_5_moe": _qwen35,
    "qwen3_next": _qwen3_next,
    "deepseek_v3": _deepseek_v3,
    "glm4_moe": _glm4_moe,
}
