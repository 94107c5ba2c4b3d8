"""The interface of a model family, by which the engine drafts and verifies.

Each family has a file in this folder, a function here that imports it, and a line in `_FAMILIES`.
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
    """The kinds of hidden states that `hidden` can give, the usual one first."""
    hidden_kind: HiddenKind
    """The kind that `hidden` gives, which is the head's input."""
    swaps: ClassVar[Swaps]
    """The layer classes that `prepare` replaces."""

    def hidden(self, tokens: mx.array, caches: Sequence[object]) -> mx.array:
        """Appends ids (1, n) to the caches -> (1, n, H); no logits are computed."""
        ...

    def logits(self, hidden: mx.array) -> mx.array:
        """(1, n, H) of `hidden` -> (1, n, V)."""
        ...

    @property
    def output(self) -> nn.Module:
        """The matrix of `lm_head`: a linear layer, or the embeddings if they are tied."""
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


class ImageFamily(Family, Protocol):
    """A family whose models may read images."""

    def hidden_of(self, embeddings: mx.array, caches: Sequence[object]) -> mx.array:
        """`hidden` of what stands in place of the embeddings of ids, (1, n, H)."""
        ...


def family_of(model: nn.Module, hidden_kind: HiddenKind | None = None) -> Family | None:
    """The family of a loaded mlx-lm model; None if there is no file for it.

    `hidden_kind`: the head's input, one of the family's `hidden_kinds`; None: the usual one.
    """
    family_class = _class_for(model)
    if family_class is None:
        return None
    return family_class(model, hidden_kind or family_class.hidden_kinds[0])


def prepare(model: nn.Module) -> None:
    """Replaces layer classes of a loaded model so that its rows can be rolled back, and so that a
    verify computes the same bits as single rows.

    Instances change class rather than the class its methods: weights stay as they are, and another
    model in the process, or another patch, is not touched.
    """
    family_class = _class_for(model)
    if family_class is None:
        return
    for _, module in model.named_modules():
        if stand_in := family_class.swaps.get(type(module)):
            module.__class__ = stand_in


def draft_logits(
    family: Family, head: DraftHead, vocabulary: int = 0
) -> Callable[[mx.array], mx.array]:
    """(1, n, H) of the head's output -> (1, n, V), or of the first `vocabulary` ids only."""
    lm_head = first_rows(family.output, vocabulary) if vocabulary else family.lm_head
    return lambda output: lm_head(head.read_out(output))


def _class_for(model: nn.Module) -> type[Any] | None:
    import_class = _FAMILIES.get(type(model).__module__.removeprefix("mlx_lm.models."))
    return import_class() if import_class is not None else None


# mlx-lm has over a hundred modules: one is imported only for a model of its family.


def _qwen35() -> type[Any]:
    from .qwen35 import Qwen35Family

    return Qwen35Family


def _qwen3_next() -> type[Any]:
    from .qwen3_next import Qwen3NextFamily

    return Qwen3NextFamily


def _deepseek_v3() -> type[Any]:
    from .deepseek_v3 import DeepseekV3Family

    return DeepseekV3Family


def _deepseek_v32() -> type[Any]:
    from .deepseek_v32 import DeepseekV32Family

    return DeepseekV32Family


def _glm4_moe() -> type[Any]:
    from .glm4_moe import Glm4MoeFamily

    return Glm4MoeFamily


def _glm4_moe_lite() -> type[Any]:
    from .glm4_moe_lite import Glm4MoeLiteFamily

    return Glm4MoeLiteFamily


def _ernie() -> type[Any]:
    from .ernie import ErnieFamily

    return ErnieFamily


def _longcat() -> type[Any]:
    from .longcat import LongcatFamily

    return LongcatFamily


def _nemotron_h() -> type[Any]:
    from .nemotron_h import NemotronFamily

    return NemotronFamily


def _mimo_v2() -> type[Any]:
    from .mimo_v2 import MimoV2Family

    return MimoV2Family


def _step3p5() -> type[Any]:
    from .step3p5 import StepFamily

    return StepFamily


def _mimo() -> type[Any]:
    from .mimo import MimoFamily

    return MimoFamily


_FAMILIES: dict[str, Callable[[], type[Any]]] = {
    "qwen3_5": _qwen35,
    "qwen3_5_moe": _qwen35,
    "qwen3_next": _qwen3_next,
    "deepseek_v3": _deepseek_v3,
    "deepseek_v32": _deepseek_v32,
    "glm_moe_dsa": _deepseek_v32,
    "glm4_moe": _glm4_moe,
    "glm4_moe_lite": _glm4_moe_lite,
    "ernie4_5": _ernie,
    "ernie4_5_moe": _ernie,
    "longcat_flash": _longcat,
    "mimo": _mimo,
    "mimo_v2_flash": _mimo_v2,
    "step3p5": _step3p5,
    "nemotron_h": _nemotron_h,
}
