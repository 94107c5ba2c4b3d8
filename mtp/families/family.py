"""A model family, by which the engine drafts and verifies: the base class."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import mlx.core as mx
from mlx import nn
from mlx_lm.models.cache import KVCache

from ..caches.rollback import RowCache, Swaps, swap_classes
from .head import DraftHead, HeadSource, HiddenKind, renamed

Logits = Callable[[mx.array], mx.array]


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
    head_names: ClassVar[Mapping[str, str]] = {
        **{name: name for name in ("enorm.", "hnorm.", "eh_proj.")},
        "shared_head.norm.": "norm.",
        "": "layer.",
    }
    """Beginnings of a head's canonical names, and of the parameters of `DraftHead`."""
    array_mask: ClassVar[bool] = False
    """Whether the family's layers need masks as arrays."""
    hidden_first: ClassVar[bool] = False
    """See `DraftHead`."""

    def __init__(self, model: nn.Module, hidden_kind: HiddenKind | None = None) -> None:
        """`hidden_kind`: one of `hidden_kinds`, by default the usual one."""
        self.hidden_kind: HiddenKind = hidden_kind or self.hidden_kinds[0]
        """The kind that `hidden` gives, which is the head's input."""
        self._model: Any = model
        self._body: Any = self._model[self.body]

    def hidden(self, tokens: mx.array, caches: Sequence[object]) -> mx.array:
        """Appends ids (1, n) to the caches -> (1, n, H); no logits are computed."""
        return self._body(tokens, caches)

    def hidden_of(
        self, tokens: mx.array, embeddings: mx.array, caches: Sequence[object]
    ) -> mx.array:
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

    def make_cache(self) -> RowCache:
        """The cache of the head's layer, without rows."""
        return KVCache()

    def head_layer(self) -> nn.Module:
        """The head's decoder layer, weights not yet loaded."""
        raise NotImplementedError

    def make_head(self) -> DraftHead:
        """The family's head, weights not yet loaded."""
        return self.head_of(self.head_layer(), self._model.args.rms_norm_eps)

    def head_of(self, layer: nn.Module, eps: float, window: int | None = None) -> DraftHead:
        """A head with a decoder layer, which attends to `window` rows, or to all."""
        swap_classes(layer, self.swaps)
        return DraftHead(
            layer,
            self._model.args.hidden_size,
            eps,
            self.hidden_kind,
            self.make_cache,
            array_mask=self.array_mask,
            window=window,
            hidden_first=self.hidden_first,
        )

    def head_parameters(self, source: HeadSource) -> dict[str, mx.array]:
        """The checkpoint's tensors as the head's parameters; quantised ones as mlx packs them.

        Raises HeadUnusable; `load_head` names what lacks.
        """
        return self.named(source.tensors)

    def named(self, tensors: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """Tensors of canonical names under those of the head's parameters."""
        return {renamed(name, self.head_names): tensor for name, tensor in tensors.items()}

    def canonical(self, parameter: str) -> str:
        """The canonical name of a parameter of the head."""
        return renamed(parameter, {ours: theirs for theirs, ours in self.head_names.items()})


def draft_logits(family: Family, head: DraftHead, vocabulary: int = 0) -> Logits:
    """(1, n, H) of the head's output -> (1, n, V), or of the first `vocabulary` ids only.

    Tokenizers trained by merging pairs number frequent tokens first, so a prefix of the vocabulary
    holds nearly all of a text (llama.cpp's pull request 20700 drafts from 32k of Qwen's 248k ids).
    The target verifies against all of it; an id beyond the prefix is never drafted.
    """
    lm_head = first_rows(family.output, vocabulary) if vocabulary else family.lm_head
    return lambda output: lm_head(head.read_out(output))


def first_rows(matrix: nn.Module, rows: int) -> Logits:
    """(1, n, H) -> (1, n, rows) of an lm_head or of embeddings that serve as one.

    `rows` below the vocabulary's size. The slices are views: they take no memory of their own. Rows
    are quantised each by itself, so the logits that remain are the same numbers.
    """
    m: Any = matrix
    weight = m.weight[:rows]
    if isinstance(matrix, nn.QuantizedLinear | nn.QuantizedEmbedding):
        scales = m.scales[:rows]
        biases = None if m.get("biases") is None else m.biases[:rows]
        form = {"group_size": m.group_size, "bits": m.bits, "mode": m.mode}
        return lambda x: mx.quantized_matmul(x, weight, scales, biases, transpose=True, **form)
    bias = m.get("bias")
    if bias is None:
        return lambda x: x @ weight.T
    return lambda x: x @ weight.T + bias[:rows]
