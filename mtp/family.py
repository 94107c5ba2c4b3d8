"""A model family, by which the engine drafts and verifies.

Each family has a file in this folder, and a case in `_class_for`.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import mlx.core as mx
from mlx import nn

from .draft_vocabulary import first_rows
from .head import DraftHead, HiddenKind
from .rollback import Swaps, swap_classes
from .weights import HeadSource, HeadUnusable


class Family:
    """A loaded model taken apart where multi-token prediction needs it.

    A family's class says how its draft head is made, and what differs from the usual parts.
    """

    hidden_kinds: ClassVar[tuple[HiddenKind, ...]] = ("post_norm",)
    """The kinds of hidden states that `hidden` can give, the usual one first."""
    swaps: ClassVar[Swaps] = {}
    """The layer classes that `prepare` replaces."""
    body: ClassVar[str] = "model"
    """The model's part with the layers, by name."""

    def __init__(self, model: nn.Module, hidden_kind: HiddenKind | None = None) -> None:
        """`hidden_kind`: one of `hidden_kinds`; None: the usual one."""
        self.hidden_kind: HiddenKind = hidden_kind or self.hidden_kinds[0]
        """The kind that `hidden` gives, which is the head's input."""
        self._model: Any = model
        self._body: Any = self._model[self.body]

    def hidden(self, tokens: mx.array, caches: Sequence[object]) -> mx.array:
        """Appends ids (1, n) to the caches -> (1, n, H); no logits are computed."""
        return self._body(tokens, caches)

    def hidden_of(self, embeddings: mx.array, caches: Sequence[object]) -> mx.array:
        """`hidden` of what stands in place of the embeddings of ids, (1, n, H), where models of the
        family read images."""
        raise NotImplementedError

    def logits(self, hidden: mx.array) -> mx.array:
        """(1, n, H) of `hidden` -> (1, n, V)."""
        return self.lm_head(hidden if self.hidden_kind == "post_norm" else self._body.norm(hidden))

    @property
    def output(self) -> nn.Module:
        """The matrix of `lm_head`: a linear layer, or the embeddings if they are tied."""
        return self._model.lm_head if "lm_head" in self._model else self._body.embed_tokens

    def lm_head(self, normed: mx.array) -> mx.array:
        """(1, n, H) after a final norm, the backbone's or the head's -> (1, n, V)."""
        output: Any = self.output
        return (output if "lm_head" in self._model else output.as_linear)(normed)

    def embed(self, tokens: mx.array) -> mx.array:
        """Ids (1, n) -> (1, n, H)."""
        return self._body.embed_tokens(tokens)

    def make_head(self) -> Any:
        """A `DraftHead` (and nn.Module) of this family's shape, weights not yet loaded."""
        raise NotImplementedError

    def head_parameters(self, source: HeadSource) -> dict[str, mx.array] | HeadUnusable:
        """The checkpoint's tensors as the head's parameters; quantised ones as mlx packs them."""
        raise NotImplementedError


def family_of(model: nn.Module, hidden_kind: HiddenKind | None = None) -> Family | None:
    """The family of a loaded mlx-lm model; None if there is no file for it.

    `hidden_kind`: the head's input, one of the family's `hidden_kinds`; None: the usual one.
    """
    family_class = _class_for(model)
    return None if family_class is None else family_class(model, hidden_kind)


def prepare(model: nn.Module) -> None:
    """Replaces layer classes of a loaded model so that its rows can be rolled back, and so that a
    verify computes the same bits as single rows."""
    if (family_class := _class_for(model)) is not None:
        swap_classes(model, family_class.swaps)


def draft_logits(
    family: Family, head: DraftHead, vocabulary: int = 0
) -> Callable[[mx.array], mx.array]:
    """(1, n, H) of the head's output -> (1, n, V), or of the first `vocabulary` ids only."""
    lm_head = first_rows(family.output, vocabulary) if vocabulary else family.lm_head
    return lambda output: lm_head(head.read_out(output))


def _class_for(model: nn.Module) -> type[Family] | None:
    """The class for a module of mlx-lm, which has over a hundred: one is imported only for a model
    of its family."""
    match type(model).__module__.removeprefix("mlx_lm.models."):
        case "qwen3_5" | "qwen3_5_moe":
            from .qwen35 import Qwen35Family as family_class
        case "qwen3_next":
            from .qwen3_next import Qwen3NextFamily as family_class
        case "deepseek_v3":
            from .deepseek_v3 import DeepseekV3Family as family_class
        case "deepseek_v32" | "glm_moe_dsa":
            from .deepseek_v32 import DeepseekV32Family as family_class
        case "glm4_moe":
            from .glm4_moe import Glm4MoeFamily as family_class
        case "glm4_moe_lite":
            from .glm4_moe_lite import Glm4MoeLiteFamily as family_class
        case "ernie4_5" | "ernie4_5_moe":
            from .ernie import ErnieFamily as family_class
        case "longcat_flash":
            from .longcat import LongcatFamily as family_class
        case "mimo":
            from .mimo import MimoFamily as family_class
        case "mimo_v2_flash":
            from .mimo_v2 import MimoV2Family as family_class
        case "step3p5":
            from .step3p5 import StepFamily as family_class
        case "nemotron_h":
            from .nemotron_h import NemotronFamily as family_class
        case _:
            return None
    return family_class
