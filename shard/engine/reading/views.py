"""Parts of a whole model's layers, over the same weights, for prompts that several runners read."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Final

import mlx.core as mx

from ....mtp.seams import FORWARD_FAULTS, ForwardOutput, Want, as_row
from ....mtp.targets import FamilyTarget, TappedTarget, WholeTarget
from ....placement.errors import LoadFailed
from ...model.stage_model import StageModel
from ...model.tensors import DTYPES
from .layer_rows import LayerForm

VIEW_FAULTS: Final = (LoadFailed, *FORWARD_FAULTS)
"""Exceptions for layers that cannot be read apart from the others."""


class LayerViews:
    """All methods run on the compute thread."""

    def __init__(
        self,
        stage: StageModel,
        target: FamilyTarget | TappedTarget | WholeTarget | None,
        *,
        hidden_size: int,
        dtype: str,
        context_length: int,
        require_splittable: Callable[[int, int], None],
    ) -> None:
        """`target`: computes with the whole model; None where not all of it is here.
        `require_splittable` raises LoadFailed for layers that do not compute the same as
        in the whole model."""
        self.drafts_from_layers = isinstance(target, TappedTarget)
        """Whether drafts need the outputs of inner layers, which no reader returns."""
        whole = target.plain if isinstance(target, TappedTarget) else target
        self.reads_last_apart = isinstance(whole, WholeTarget) and not whole.reads_ends
        """Whether the whole model reads a prompt's last row apart."""
        self._stage = stage
        self._target = whole
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._context_length = context_length
        self.check: Callable[[int, int], None] = cache(require_splittable)
        """Checks the layers that are computed here; other nodes check theirs. Raises likewise."""
        self.part: Callable[[int, int], StageModel] = cache(self._part)
        """The layers [first, end). Raises one of VIEW_FAULTS."""
        self.form: Callable[[int, int], LayerForm] = cache(self._form)
        """The form of their caches. Raises likewise."""

    @property
    def num_layers(self) -> int:
        """Layers of the whole model."""
        return self._stage.num_layers

    @property
    def dtype(self) -> str:
        """The dtype of hidden states."""
        return self._dtype

    @property
    def hidden_size(self) -> int:
        """Numbers of a hidden state."""
        return self._hidden_size

    def output(self, ids: Sequence[int], hidden: mx.array, want: Want) -> ForwardOutput:
        """The output of the whole model's forward over a prompt, from the last layer's `hidden`
        (1, n, H) of `ids`; lazy."""
        assert self._target is not None
        if isinstance(self._target, WholeTarget):
            row = as_row(ids[-1:])[None]
            return ForwardOutput(self._stage.logits(row, hidden[:, -1:])[0], None)
        with self._stage.after_layers(hidden):
            return self._target.forward(as_row(ids), self._stage.make_caches(), want=want)

    def _part(self, first: int, end: int) -> StageModel:
        stage = self._stage
        part = StageModel(stage.model, first, end, stage.kv, stage.rope_positions)
        if part.shares_caches:
            raise LoadFailed("layers of this model share caches with others")
        return part

    def _form(self, first: int, end: int) -> LayerForm:
        dtype = DTYPES[self._dtype]
        return LayerForm.of(self.part(first, end), self._hidden_size, dtype, self._context_length)


class PartReader:
    """Some layers as a `PromptReader`: they give hidden states and no logits."""

    def __init__(self, part: StageModel, *, last_apart: bool) -> None:
        """`last_apart`: whether the whole model reads a prompt's last row apart."""
        self._part = part
        self._last_apart = last_apart
        self.rope_positions = part.rope_positions

    def entering(self) -> mx.array | None:
        """The hidden states (1, n, H) of the layers before, with the positions set; None if these
        are the first ones."""
        return None

    def forward(
        self,
        tokens: mx.array,
        caches: Sequence[object],
        *,
        want: Want,
        embeddings: mx.array | None = None,
    ) -> ForwardOutput:
        """Appends ids (rows,) to its caches, as the whole model would; lazy."""
        ids, entering, rows = tokens[None], self.entering(), len(tokens)
        is_text = self.rope_positions.places is None
        apart = self._last_apart and want == "last" and rows > 1 and is_text
        outputs = [
            self._part.hidden(
                ids[:, some],
                None if entering is None else entering[:, some],
                caches,
                None if embeddings is None else embeddings[:, some],
                is_lazy=True,
            )
            for some in (slice(rows - apart), slice(rows - apart, rows))[: 1 + apart]
        ]
        return ForwardOutput(mx.zeros((0, 1)), mx.concatenate(outputs, axis=1))
