"""A model family, by which the engine drafts and verifies: the base class."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import mlx.core as mx
from mlx import nn

from ..caches.rollback import Swaps
from .draft_vocabulary import first_rows
from .head import DraftHead, HeadSource, HeadUnusable, HiddenKind


class Family:
    """A loaded model taken apart where multi-token prediction needs it.

    A family's class makes its draft head and replaces the parts that differ from the usual ones.
    """

    hidden_kinds: ClassVar[tuple[HiddenKind, ...]] = ("post_norm",)
    """The kinds of hidden states that `hidden` can give, the usual one first."""
    swaps: ClassVar[Swaps] = {}
    """The layer classes that `table.prepare` replaces."""
    body: ClassVar[str] = "model"
    """The model's part with the layers, by name."""

    def __init__(self, model: nn.Module, hidden_kind: HiddenKind | None = None) -> None:
        """`hidden_kind`: one of `hidden_kinds`, by default the usual one."""
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


def draft_logits(
    family: Family, head: DraftHead, vocabulary: int = 0
) -> Callable[[mx.array], mx.array]:
    """(1, n, H) of the head's output -> (1, n, V), or of the first `vocabulary` ids only."""
    lm_head = first_rows(family.output, vocabulary) if vocabulary else family.lm_head
    return lambda output: lm_head(head.read_out(output))
