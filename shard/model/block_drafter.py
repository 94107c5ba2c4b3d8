"""A block drafter beside its target: mlx-vlm's DFlash layers, which draft K tokens in one forward.

Its layers attend to the target's rows, of which some inner layers' outputs are its input, and to a
block of the last token and K masks. The target's embeddings and lm_head serve it too.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache

from ...mtp.caches.rollback import RowCache, cache_of, fixed_kinds, parts_of
from ...mtp.families.family import Family
from ...mtp.families.table import family_of
from ...mtp.families.weights import cast_parameters
from ...mtp.targets import FamilyTarget, LayerTaps, TappedTarget, WholeTarget
from ...proto import peer_pb2 as pb
from ..checkpoint.checkpoint import read_checkpoint
from ..checkpoint.drafters import (
    DrafterUnusable,
    absent_drafter,
    is_own,
    is_second,
    read_drafter,
    reading_drafter,
)
from ..checkpoint.vision import ADD_DRAFTERS, has_extra
from ..text.bare_packages import bare_package
from .open_model import MODEL_FAULTS, headline
from .stage_limits import StageLimits
from .stage_model import StageModel

_PACKAGES: Final = (
    "mlx_vlm.models",
    "mlx_vlm.speculative.drafters.qwen3_dflash",
    "mlx_vlm.speculative.drafters.dflash2",
)
_OTHERS: Final = 1e4
"""The distance of logits that a selector does not rank below those that it does."""


class BlockDrafter:
    """A drafter and what it shares with its target. All methods run on the compute thread."""

    def __init__(
        self, module: Any, model: nn.Module, layers: Sequence[nn.Module], fingerprint: str
    ) -> None:
        """`module`: mlx-vlm's model with its weights. `model`, `layers`: the target's.

        `fingerprint`: of the drafter's checkpoint.
        """
        text: Any = model
        if "language_model" in model:
            text = text.language_model
        family = family_of(model) or Family(text)
        _ = family.output  # some classes have it elsewhere: an error of the load
        self.module = module
        self.fingerprint = fingerprint
        self.embed = family.embed
        self._lm_head = family.lm_head
        self._dtype: mx.Dtype = module.norm.weight.dtype
        ids: list[int] = module.config.target_layer_ids
        self._layers = [layers[i] for i in ids]
        self._taps: LayerTaps | None = None
        for layer in module.layers:
            layer.self_attn = _CachedAttention(layer.self_attn)

    def target(
        self, target: FamilyTarget | WholeTarget, *, with_hidden: bool = False
    ) -> TappedTarget:
        """The target as it is decoded with this drafter, whose input its hidden states are.

        `with_hidden`: after the target's own.
        """
        if self._taps is None:
            self._taps = LayerTaps(self._layers)
        return TappedTarget(target, self._taps, self._join, with_hidden=with_hidden)

    @property
    def width(self) -> int:
        """Numbers of one of its rows."""
        return self.module.config.hidden_size

    @property
    def num_caches(self) -> int:
        """Parts of its cache."""
        return len(self.module.layers)

    def make_cache(self) -> RowCache:
        """The cache of all layers, without rows."""
        return cache_of([KVCache() for _ in self.module.layers])

    def read(self, hidden: mx.array, embedding: mx.array, cache: RowCache) -> mx.array:
        """Appends rows (B, n, H) of `target` to the cache. Returns the embeddings, of which the
        last begins the next block."""
        for layer, part in zip(self.module.layers, parts_of(cache), strict=True):
            layer.self_attn.read(hidden, self.module.rope, part)
        return embedding

    def block(self, first: mx.array, k: int, cache: RowCache) -> mx.array:
        """The output (B, k, H) of k masks after the embedding (B, 1, H) of each request's last
        token. The cache stays as it is."""
        masks = mx.full((first.shape[0], k), self.module.config.mask_token_id, mx.int32)
        x = mx.concatenate([first, self.embed(masks).astype(first.dtype)], axis=1)
        x = x.astype(self._dtype) * getattr(self.module.config, "input_embedding_scale", 1.0)
        for layer, part in zip(self.module.layers, parts_of(cache), strict=True):
            x = layer(x, None, self.module.rope, part)
        return self.module.norm(x)[:, 1:]

    def logits(self, output: mx.array) -> mx.array:
        """(B, n, H) of `block` -> (B, n, V)."""
        config = self.module.config
        logits, cap = self._lm_head(output), config.final_logit_softcapping
        logits = logits * getattr(config, "output_multiplier", 1.0)
        return logits if cap is None else mx.tanh(logits / cap) * cap

    def first_drafts(self, width: int, k: int) -> mx.array:
        """The logits (B, V) of the last of k drafts after a row, computed as in an answer.

        All prompts pass a drafter: what fails here would fail in answers that draft nothing, too.
        `width`: numbers that a layer of the target gives.
        """
        cache, ids = self.make_cache(), mx.zeros((1, 1), mx.int32)
        row = self._join([mx.zeros((1, 1, width), self._dtype)] * len(self._layers))
        output = self.block(self.read(row, self.embed(ids), cache), k, cache)[:, -1:]
        logits = self.logits(output)[:, 0]
        return logits if self.follow is None else self.follow(output, logits, ids[0])

    @property
    def follow(self) -> Callable[[mx.array, mx.array, mx.array], mx.array] | None:
        """See `DraftModel`; None for drafts that do not depend on each other."""
        return self._select if "candidate_selector" in self.module else None

    def _select(self, output: mx.array, logits: mx.array, before: mx.array) -> mx.array:
        """Ranks the best few ids by the ids `before` as well. Others stay, far below."""
        selector = self.module.candidate_selector
        best = mx.argpartition(logits, -selector.top_k, axis=-1)[:, -selector.top_k :]
        by_pair = selector.predecessor_codebook(before)[:, None]
        by_pair = by_pair * selector.hidden_projection(output) * selector.successor_codebook(best)
        scores = mx.take_along_axis(logits, best, axis=-1) + by_pair.sum(axis=-1)
        return mx.put_along_axis(logits - _OTHERS, best, scores.astype(logits.dtype), axis=-1)

    def _join(self, outputs: Sequence[mx.array]) -> mx.array:
        """The outputs (B, n, H) of the chosen layers, as the drafter's layers read them."""
        joined = mx.concatenate([output.astype(self._dtype) for output in outputs], axis=-1)
        return self.module.hidden_norm(self.module.fc(joined))


class _CachedAttention(nn.Module):
    """The attention of a drafter's layer over a cache that `read` fills, alone or in a batch."""

    def __init__(self, stock: Any) -> None:
        super().__init__()
        self.stock = stock
        window = stock.sliding_window
        self._window: int | None = None if window is None else window - 1

    def read(self, rows: mx.array, rope: Any, cache: Any) -> None:
        """Appends keys and values of the target's rows (B, n, H)."""
        keys, values = self._keys_and_values(rows)
        _ = cache.update_and_fetch(rope(keys, offset=cache.offset), values)

    def __call__(self, x: mx.array, _context: None, rope: Any, cache: Any, *_: None) -> mx.array:
        """A block (B, n, H), each row of which attends to the cache's rows and to the block."""
        a, (batch, rows, _width) = self.stock, x.shape
        queries = a.q_norm(a.q_proj(x).reshape(batch, rows, a.n_heads, -1)).transpose(0, 2, 1, 3)
        keys, values = self._keys_and_values(x)
        past, past_values, mask = self._past(cache, rows)
        out = mx.fast.scaled_dot_product_attention(
            rope(queries, offset=cache.offset),
            mx.concatenate([past, rope(keys, offset=cache.offset)], axis=2),
            mx.concatenate([past_values, values], axis=2),
            scale=a.scale,
            mask=mask,
            sinks=a.attention_sink_bias,
        )
        return a.o_proj(out.transpose(0, 2, 1, 3).reshape(batch, rows, -1))

    def _keys_and_values(self, rows: mx.array) -> tuple[mx.array, mx.array]:
        a, (batch, count, _width) = self.stock, rows.shape
        shape = batch, count, a.n_kv_heads, -1
        keys, values = a.k_proj(rows).reshape(shape), a.v_proj(rows).reshape(shape)
        return a.k_norm(keys).transpose(0, 2, 1, 3), values.transpose(0, 2, 1, 3)

    def _past(self, cache: Any, rows: int) -> tuple[mx.array, mx.array, mx.array | None]:
        """Keys and values of the cache that a block of `rows` rows may see, and its mask."""
        if isinstance(cache, KVCache):
            window, end = self._window, cache.offset
            begin = 0 if window is None else max(0, end - window)
            keys, values = cast("mx.array", cache.keys), cast("mx.array", cache.values)
            return keys[:, :, begin:end], values[:, :, begin:end], None
        keys, values = cache.keys_and_values()
        places, counts = mx.arange(keys.shape[2]), cache.offset[:, None]
        visible = places < counts
        if self._window is not None:
            visible &= places >= counts - self._window
        block = mx.ones((visible.shape[0], rows), mx.bool_)
        return keys, values, mx.concatenate([visible, block], axis=1)[:, None, None]


def load_block_drafter(
    spec: pb.StageSpec, stage: StageModel, limits: StageLimits, dtype: mx.Dtype
) -> BlockDrafter:
    """The drafter that a whole model's `spec` names, evaluated.

    Raises DrafterUnusable.
    """
    name, folder = spec.drafter, Path(spec.drafter_path)
    if not spec.drafter_path:
        raise DrafterUnusable(spec.drafter_fault) if spec.drafter_fault else absent_drafter(name)
    with reading_drafter(name):
        checkpoint = read_checkpoint(folder)
        facts = read_drafter(checkpoint, name)
    layers = stage.own_layers
    facts.require_fit(limits.vocabulary, limits.hidden_size, len(layers), spec.max_draft_tokens)
    if kinds := fixed_kinds(stage.make_caches()):
        raise DrafterUnusable(
            f"rows cannot be taken back from this model's caches ({', '.join(kinds)}), so drafts "
            "cannot be verified; remove [drafter] from the card"
        )
    if not has_extra():
        raise DrafterUnusable(ADD_DRAFTERS)
    if facts.weight_bytes > spec.drafter_bytes:
        raise DrafterUnusable(
            f"the plan has no memory for the {facts.weight_bytes / 1e6:,.0f} MB of the block "
            f"drafter {name}: get it with `exo-node models pull {name}` on the head's machine too, "
            "or write drafter.weight_bytes and drafter.cached_numbers into the card, and load the "
            "model again"
        )
    try:
        module = _module(checkpoint.config, folder)
        cast_parameters(module, dtype)
        drafter = BlockDrafter(module, stage.model, layers, checkpoint.fingerprint)
        module.eval()
        mx.eval(module.parameters())
        mx.eval(drafter.first_drafts(limits.hidden_size, spec.max_draft_tokens))
    except MODEL_FAULTS as fault:
        raise DrafterUnusable(
            f"the block drafter {name} cannot be loaded ({headline(fault)}); use a whole copy of "
            "the publisher's checkpoint"
        ) from fault
    return drafter


def _module(config: Mapping[str, Any], folder: Path) -> Any:
    """mlx-vlm's model with its weights, which are lazy."""
    for package in _PACKAGES:
        bare_package(package)
    module: Any
    if is_second(config):
        from mlx_vlm.speculative.drafters.dflash2.config import DFlash2Config
        from mlx_vlm.speculative.drafters.dflash2.dflash2 import DFlash2DraftModel

        module = DFlash2DraftModel(DFlash2Config.from_dict(dict(config)))
    else:
        from mlx_vlm.speculative.drafters.qwen3_dflash.config import DFlashConfig
        from mlx_vlm.speculative.drafters.qwen3_dflash.dflash import DFlashDraftModel

        module = DFlashDraftModel(DFlashConfig.from_dict(dict(config)))
    files = sorted(folder.glob("model*.safetensors"))
    stored = {k: v for f in files for k, v in cast("dict[str, Any]", mx.load(str(f))).items()}
    weights = module.sanitize({name: stored[name] for name in stored if is_own(name)})
    packed = {name.removesuffix(".scales") for name in weights if name.endswith(".scales")}
    if packed:
        form: Any = config.get("quantization") or {}
        size, bits = form.get("group_size", 64), form.get("bits", 4)
        nn.quantize(module, size, bits, class_predicate=lambda path, _: path in packed)
    for name, parameter in cast("list[tuple[str, mx.array]]", tree_flatten(module.parameters())):
        stored_as = weights.get(name, parameter).dtype
        if mx.issubdtype(stored_as, mx.floating) != mx.issubdtype(parameter.dtype, mx.floating):
            raise ValueError(f"{name} is stored as {stored_as}, where {parameter.dtype} is read")
    module.load_weights(list(weights.items()))
    return module
