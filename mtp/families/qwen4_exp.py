"""Qwen3.8-Flash-Next: mlx-vlm's qwen4_exp, which mlx-lm lacks, made a model as mlx-lm's are, and
its head.

The hidden state is several streams side by side, which each layer mixes, so it is `hc_count` times
as wide as an embedding; n-grams of the ids add rows of a table at some layers; attention reads the
blocks of keys that an indexer chooses. The modules are mlx-vlm's. Rewritten here are the parts
that compute several rows otherwise than single ones, and the caches.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final, cast

import mlx.core as mx
from mlx import nn
from mlx_lm.models import switch_layers
from mlx_lm.models.base import create_attention_mask, scaled_dot_product_attention
from mlx_lm.models.cache import CacheList, KVCache
from mlx_vlm.models import switch_layers as vlm_switch_layers
from mlx_vlm.models.qwen4_exp import language
from mlx_vlm.models.qwen4_exp.config import TextConfig
from mlx_vlm.models.qwen4_exp.fp8 import convert_qwen4_exp_fp8_weights

from ..caches.rollback import RowCache, Swaps, TapedCache, parts_of, rows_of_each, swap_classes
from ..caches.window import MAX_ROLLBACK_ROWS
from .family import Family
from .head import DraftHead, HeadSource, HeadUnusable, HiddenKind
from .latent_attention import scores_of_rows
from .placed_rope import PlacedRows, row_numbers
from .qwen import split_fused_experts, stack_experts
from .row_table import RowTable, ours_of
from .taped_gated_delta import TapedGatedDelta

_CONV, _STATE, _PLE_CONV, _IDS = range(4)
"""A recurrent layer's arrays; the last two where n-grams are added."""


class WindowRows:
    """In place of a cache for mlx-vlm's n-gram layer: collects the windows that it stores."""

    def __init__(self, cache: TapedCache) -> None:
        self._cache = cache
        self.windows: dict[int, tuple[mx.array, int]] = {}
        """The rows with those before them, and how many stay, by their place in the cache."""

    def __getitem__(self, index: int) -> mx.array | None:
        return self._cache[index]

    def update_window(self, index: int, rows: mx.array, width: int) -> None:
        self.windows[index] = rows, width

    def commit(self) -> None:
        """Stores the windows, and adds them to the tape of the forward."""
        cache = self._cache
        for index, (rows, width) in self.windows.items():
            cache[index] = mx.contiguous(rows[:, rows.shape[1] - width :])
        windows = [window for _, window in sorted(self.windows.items())]
        cache.extend_tape(
            lambda count: [mx.contiguous(r[:, count : count + width]) for r, width in windows],
            lambda at: [rows_of_each(r, at[1], width) for r, width in windows],
        )


class StreamsDelta(TapedGatedDelta, language.Qwen4ExpGatedDeltaNet):
    """The gated delta layer with a tape. Of mlx-vlm's two convolutions, one of which is for single
    rows, it computes the other for all."""

    takes_kernel = False

    def project(self, inputs: mx.array) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        z = self.in_proj_z(inputs).reshape(*inputs.shape[:2], self.num_v_heads, self.head_v_dim)
        return self.in_proj_qkv(inputs), z, self.in_proj_b(inputs), self.in_proj_a(inputs)

    def __call__(
        self, inputs: mx.array, mask: mx.array | None = None, cache: Any = None
    ) -> mx.array:
        if self.chunked is not None and inputs.shape[1] > MAX_ROLLBACK_ROWS:
            return self._rows(inputs, cache, self._by_chunks)
        return self._rows(inputs, cache, self._by_steps)

    def _normalized(self, q: mx.array, k: mx.array) -> tuple[mx.array, mx.array]:
        return self._normalize_qk(q, k)


class BlockwiseAttention(PlacedRows, language.Qwen4ExpAttention):
    """Attention to chosen blocks of keys, whose rows are computed as each is alone.

    The cache has two parts: keys and values, and the indexer's rows. Their keys are those of single
    tokens, each with its position, and in place of values stands the key of a block that would end
    with that token: so each is computed once, a rollback only trims, and those of whole blocks are
    every fourth row. A block's key is turned by the position of its first token, which may be one
    of an image in an earlier forward.
    Of blocks with equal scores the last ones are read, as MLX sorts, whatever rows a batch has.
    """

    def __call__(
        self,
        x: mx.array,
        mask: Any = None,
        cache: Any = None,
        position_ids: Any = None,
        position_embeddings: Any = None,
    ) -> mx.array:
        del position_ids, position_embeddings
        batch, rows, _ = x.shape
        store, index = cache[0], cache[1]
        offset = store.offset
        ends = mx.broadcast_to(row_numbers(offset, rows) + 1, (batch, rows))
        at = self.positions.rows_after(offset, batch, rows)
        query, blocks = self._index_rows(x, index, at)
        q, k, v, gate, _ = self._prepare_projected_qkv(
            self.q_proj(x), self.k_proj(x), self.v_proj(x), store, at, None, None
        )
        store.keys = mx.depends(store.keys, (index.keys, index.values))
        length, ratio = k.shape[2], self.indexer.compress_ratio
        spans = store.key_spans(rows) if batch > 1 and rows <= MAX_ROLLBACK_ROWS else None
        if length // ratio <= self.indexer.block_topk:
            out = self._attend(q, k, v, store, mask)
        elif rows > MAX_ROLLBACK_ROWS or (batch > 1 and spans is None):
            out = self._attend(q, k, v, None, self._chosen(query, blocks, ends, length))
        else:
            requests = list[mx.array]()
            for at in range(batch):
                own, each = slice(at, at + 1), list[mx.array]()
                for row in range(rows):
                    one, end = slice(row, row + 1), length - (rows - 1 - row)
                    if spans is not None:
                        end = spans[at][row].end
                    chosen = None
                    if end // ratio > self.indexer.block_topk:
                        few = blocks[own, :, : end // ratio]
                        chosen = self._chosen(query[own, :, one], few, ends[own, one], end)
                    visible = k[own, :, :end], v[own, :, :end]
                    each.append(self._attend(q[own, :, one], *visible, None, chosen))
                requests.append(mx.concatenate(each, axis=2))
            out = mx.concatenate(requests)
        joined = out.transpose(0, 2, 1, 3).reshape(batch, rows, -1)
        return self.o_proj(joined * mx.sigmoid(gate))

    def _attend(self, q: mx.array, k: mx.array, v: mx.array, cache: Any, mask: Any) -> mx.array:
        return scaled_dot_product_attention(q, k, v, cache=cache, scale=self.scale, mask=mask)

    def _index_rows(self, x: mx.array, cache: Any, at: mx.array) -> tuple[mx.array, mx.array]:
        """The indexer's queries (B, heads, n, D) of rows `at` positions (3, B, n), and the keys
        (B, 1, blocks, D) of all whole blocks, after these rows are cached."""
        part: Any = self.indexer
        batch, rows, _ = x.shape
        ratio = part.compress_ratio
        projected = part.index_qk_proj(x).reshape(batch, rows, -1, part.head_dim)
        query = part.q_layernorm(projected[:, :, : part.n_heads]).transpose(0, 2, 1, 3)
        query = part._apply_rope(query, at)
        raw = projected[:, :, part.n_heads :].transpose(0, 2, 1, 3)
        raw = mx.concatenate([raw, _digits(at).astype(raw.dtype)], axis=-1)
        window = mx.concatenate([_last_rows(cache, raw, ratio - 1), raw], axis=2)
        spans = [window[:, :, i : i + rows, : part.head_dim] for i in range(ratio)]
        mean = mx.mean(mx.stack(spans, axis=3).astype(mx.float32), axis=3)
        keys = part.k_layernorm(mean.astype(raw.dtype))
        keys = part._apply_rope(keys, _of_digits(window[:, 0, :rows, part.head_dim :]))
        _, blocks = cache.update_and_fetch(raw, keys)
        return query, blocks[:, :, ratio - 1 :: ratio]

    def _chosen(self, query: mx.array, blocks: mx.array, ends: mx.array, length: int) -> mx.array:
        """The mask (B, 1, n, length) of rows that see `ends` (B, n) keys each."""
        part = self.indexer
        ratio, count, most = part.compress_ratio, blocks.shape[2], part.block_topk
        q, k = query.astype(mx.float32), blocks.astype(mx.float32)
        scores = scores_of_rows(q, k) if q.shape[2] == 1 else q @ k.swapaxes(-1, -2)
        scores = mx.maximum(scores, 0).sum(axis=1) / part.head_dim**0.5
        whole = (ends // ratio)[..., None]
        scores = mx.where(mx.arange(count) < whole, scores, -1)
        least = mx.partition(scores, kth=count - most, axis=-1)[..., count - most, None]
        above = scores > least
        ties = scores == least
        room = most - above.sum(axis=-1, keepdims=True)
        chosen = above | (ties & (mx.cumsum(ties, axis=-1, reverse=True) <= room))
        keys = mx.arange(length)
        visible = mx.pad(
            mx.repeat(chosen, ratio, axis=-1), [(0, 0), (0, 0), (0, length - count * ratio)]
        )
        visible = visible | (keys >= whole * ratio) | (whole <= most)
        return (visible & (keys < ends[..., None]))[:, None]


def _digits(at: mx.array) -> mx.array:
    """Positions (3, B, n) -> (B, 1, n, 9) numbers that every dtype has."""
    digits = mx.stack([at // 256**place % 256 for place in range(3)], axis=-1)
    return digits.transpose(1, 2, 0, 3).flatten(-2)[:, None]


def _of_digits(digits: mx.array) -> mx.array:
    """(B, n, 9) of `_digits` -> (3, B, n)."""
    parts = mx.unflatten(digits.astype(mx.int32), -1, (3, 3)) * mx.array([1, 256, 256**2])
    return parts.sum(axis=-1).transpose(2, 0, 1)


def _last_rows(cache: Any, like: mx.array, count: int) -> mx.array:
    """The cache's last `count` keys of each request, or arbitrary ones where it has fewer."""
    batch, heads, _, size = like.shape
    keys = cache.keys
    if keys is None or keys.shape[2] == 0:
        return mx.zeros((batch, heads, count, size), dtype=like.dtype)
    at = mx.maximum(row_numbers(cache.offset, count) - count, 0)[:, None, :, None]
    return mx.take_along_axis(
        keys[:batch], mx.broadcast_to(at, (batch, heads, count, size)), axis=2
    )


class StreamsResidual(language.Qwen4ExpGatedResidual):
    """The mixer of streams by plain products: mlx-vlm computes those of several rows in its own
    way, and not in the groups of rows that agree here."""

    def __call__(self, hyper_input: mx.array) -> Any:
        pointwise: Any = language._qwen4_hyper_pointwise  # pyright: ignore[reportPrivateUsage]
        activate, mix, gate = pointwise(self.hc_count, self.hidden_size)
        normed = self.hc_norm(hyper_input)
        down = activate(self.input_mix_weight_down(normed))
        mixed = mix(self.input_mix_weight_up(down), normed)
        if "block_inject_weight" not in self:
            return mixed
        return mixed, hyper_input, gate(self.block_inject_weight(normed))


class StreamsExperts(language.Qwen4ExpSparseMoeBlock):
    """mlx-vlm's experts with a plain product for the gate of the shared one, likewise."""

    def _shared_expert_scale(self, x: mx.array) -> mx.array:
        return mx.sigmoid(self.shared_expert_gate(x))


class StreamsLayer(language.Qwen4ExpDecoderLayer):
    """mlx-vlm's decoder layer, whose n-grams keep their rows beside the recurrence's."""

    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, hidden_states: mx.array, input_ids: Any, mask: Any = None, cache: Any = None
    ) -> mx.array:
        windows = None
        if "ple" in self:
            windows = WindowRows(cache)
            hidden_states = hidden_states + self.ple(
                hidden_states, input_ids, cast("Any", windows), None
            )
        mixed, streams, weights = self.attn_hyper_connection(hidden_states)
        mixer = self.linear_attn if self.is_linear else self.self_attn
        branch = mixer(mixed, mask=None if self.is_linear else mask, cache=cache)
        if windows is not None:
            windows.commit()
        hidden_states = _injected(streams, branch, weights)
        mixed, streams, weights = self.mlp_hyper_connection(hidden_states)
        return _injected(streams, self.mlp(mixed), weights)


def _injected(streams: mx.array, branch: mx.array, weights: mx.array) -> mx.array:
    return streams + (branch[..., None, :] * weights[..., None]).reshape(*streams.shape)


class StreamsBody(language.Qwen4ExpModel):
    """mlx-vlm's stack of layers for caches of this project."""

    placeholder = 0
    """The id that stands for an image."""

    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, inputs: Any, cache: Sequence[Any], input_embeddings: mx.array | None = None
    ) -> mx.array:
        return self.mixed(self.streams(inputs, cache, input_embeddings))

    def mixed(self, streams: mx.array) -> mx.array:
        """(B, n, hc_count * H) -> (B, n, H), what the lm_head reads."""
        return cast("mx.array", self.hyper_connection_mixer(streams))

    def streams(
        self, inputs: Any, cache: Sequence[Any], input_embeddings: mx.array | None = None
    ) -> mx.array:
        """Appends ids (B, n) -> (B, n, hc_count * H), before they are mixed for the lm_head.

        The rows of an image have ids below 0, and n-grams read its placeholder there."""
        x = self.embed_tokens(inputs) if input_embeddings is None else input_embeddings
        inputs = mx.where(inputs < 0, self.placeholder, inputs)
        x = mx.tile(x, (1, 1, self.args.hc_count))
        mask = create_attention_mask(x, parts_of(cache[self.fa_idx])[0])
        layers: list[Any] = self.layers
        for layer, own in zip(layers, cache, strict=True):
            x = layer(x, inputs, mask, own)
        return x


SWAPS: Final[Swaps] = {
    language.Qwen4ExpModel: StreamsBody,
    language.Qwen4ExpDecoderLayer: StreamsLayer,
    language.Qwen4ExpGatedDeltaNet: StreamsDelta,
    language.Qwen4ExpAttention: BlockwiseAttention,
    language.Qwen4ExpGatedResidual: StreamsResidual,
    language.Qwen4ExpSparseMoeBlock: StreamsExperts,
    vlm_switch_layers.SwitchGLU: switch_layers.SwitchGLU,
    vlm_switch_layers.SwitchLinear: switch_layers.SwitchLinear,
}


@dataclass
class ModelArgs(TextConfig):
    """mlx-vlm's arguments of the text model, from a whole config.json or a text model's own."""

    image_token_id: int = 0

    @classmethod
    def from_dict(cls, params: Mapping[str, Any]) -> "ModelArgs":
        text = dict(params.get("text_config") or params)
        for field in ("eos_token_id", "tie_word_embeddings", "image_token_id"):
            if text.get(field) is None and params.get(field) is not None:
                text[field] = params[field]
        return super().from_dict(text)


class Model(nn.Module):
    """The text model, as mlx-lm's classes of multimodal models have it."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.args = args
        self.model_type = args.model_type
        self.language_model = language.LanguageModel(args)
        swap_classes(self.language_model, SWAPS)
        cast("Any", self.language_model.model).placeholder = args.image_token_id

    def __call__(
        self, inputs: Any, cache: Sequence[Any] | None = None, input_embeddings: Any = None
    ) -> mx.array:
        body: Any = self.language_model.model
        out = body(inputs, self.make_cache() if cache is None else cache, input_embeddings)
        if self.args.tie_word_embeddings:
            return body.embed_tokens.as_linear(out)
        return self.language_model.lm_head(out)

    @property
    def layers(self) -> list[Any]:
        return self.language_model.model.layers

    def make_cache(self) -> list[Any]:
        return [_cache_of(layer) for layer in self.layers]

    @property
    def cast_predicate(self) -> Callable[[str], bool]:
        return lambda path: not path.endswith("A_log")

    @property
    def tables(self) -> dict[str, RowTable]:
        """The tables that are read by rows, by the beginnings of their tensors' names."""
        named = {name: module for name, module in self.named_modules()}
        return {name: module for name, module in named.items() if isinstance(module, RowTable)}

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """A checkpoint's tensors as the parameters; the n-gram tables are left in their files."""
        named = {ours_of(name): value for name, value in weights.items()}
        named = {k: v for k, v in named.items() if k.startswith("language_model.")}
        if self.args.tie_word_embeddings:
            named.pop("language_model.lm_head.weight", None)
        for layer in self.layers:
            if "ple" in layer:
                part = layer.ple.ple_embedding
                if isinstance(part.ngram_embedding, language.ShardedEmbedding):
                    stock = part.ngram_embedding
                    part.ngram_embedding = RowTable(stock.shard_sizes, stock.dims)
        named = {k: v for k, v in named.items() if ".ngram_embedding." not in k}
        for name, value in named.items():
            if "conv1d.weight" in name and value.shape[-1] != 1:
                named[name] = value.moveaxis(2, 1)
        return _experts(named)


def _experts(weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Tensors whose experts are stacked, those in FP8 blocks as whole numbers. Raises ValueError
    for other tensors in FP8."""
    named = {f"model.{name}": value for name, value in weights.items()}
    whole = convert_qwen4_exp_fp8_weights(named)
    if packed := [name for name in whole if name.endswith("_scale_inv")]:
        raise ValueError(
            f"{len(packed)} tensors beside the experts are in FP8 blocks, which is not implemented "
            "for this model; take a conversion for MLX"
        )
    named = {name.removeprefix("model."): value for name, value in whole.items()}
    return stack_experts(split_fused_experts(named))


def _cache_of(layer: Any) -> Any:
    if layer.is_linear:
        return TapedCache(4 if "ple" in layer else 2)
    return attention_cache()


def attention_cache() -> CacheList:
    """Keys and values of an attention layer, and its indexer's rows."""
    return CacheList(KVCache(), KVCache())


class StreamsHead(DraftHead):
    """The draft head: each stream of the hidden state and the embedding are added, each projected,
    and a layer with attention follows, and the mixer before the lm_head."""

    def __init__(self, args: TextConfig) -> None:
        nn.Module.__init__(self)
        size, eps = args.hidden_size, args.rms_norm_eps
        self.enorm = language.Qwen4ExpRMSNorm(size, eps=eps)
        self.hnorm = language.Qwen4ExpRMSNorm(args.hc_count * size, eps=eps)
        self.fc_embedding = nn.Linear(size, size, bias=False)
        self.fc_hidden = nn.Linear(size, size, bias=False)
        alone = {"layer_types": ["qwen_sparse_attention"], "ple_layer_ids": []}
        args = replace(args, num_hidden_layers=1, **alone)
        self.layer = language.Qwen4ExpDecoderLayer(args, 0)
        self.mixer = language.Qwen4ExpGatedResidual(args, use_combine=False)
        self.hidden_kind: HiddenKind = "pre_norm"
        self.make_cache = attention_cache

    def __call__(self, hidden: mx.array, embedding: mx.array, cache: RowCache) -> mx.array:
        """Hidden (B, n, hc_count * H), embeddings (B, n, H) -> (B, n, hc_count * H)."""
        dtype = self.enorm.weight.dtype
        added = self.fc_embedding(self.enorm(embedding.astype(dtype)))[..., None, :]
        streams = self.hnorm(hidden.astype(dtype)).reshape(*added.shape[:2], -1, added.shape[-1])
        x = (added + self.fc_hidden(streams)).reshape(hidden.shape)
        mask = create_attention_mask(x, parts_of(cache)[0])
        return cast("Any", self.layer)(x, None, mask, cache).astype(hidden.dtype)

    def read_out(self, output: mx.array) -> mx.array:
        return cast("mx.array", self.mixer(output))


class StreamsFamily(Family):
    """A family whose head reads all streams, before they are mixed."""

    hidden_kinds: ClassVar[tuple[HiddenKind, ...]] = ("pre_norm",)
    swaps: ClassVar[Swaps] = SWAPS
    head_names: ClassVar[Mapping[str, str]] = {
        "pre_fc_norm_embedding.": "enorm.",
        "pre_fc_norm_hidden.": "hnorm.",
        "layers.0.": "layer.",
        "hyper_connection_mixer.": "mixer.",
        "": "",
    }

    def __init__(self, model: Model, hidden_kind: HiddenKind | None = None) -> None:
        super().__init__(model.language_model, hidden_kind)

    def hidden(self, tokens: mx.array, caches: Sequence[object]) -> mx.array:
        return self._body.streams(tokens, caches)

    def hidden_of(
        self, tokens: mx.array, embeddings: mx.array, caches: Sequence[object]
    ) -> mx.array:
        return self._body.streams(tokens, caches, embeddings)

    def logits(self, hidden: mx.array) -> mx.array:
        return self.lm_head(self._body.mixed(hidden))

    def make_head(self) -> DraftHead:
        head = StreamsHead(self._model.args)
        swap_classes(head, SWAPS)
        return head

    def head_parameters(self, source: HeadSource) -> dict[str, mx.array]:
        try:
            return self.named(_experts(source.tensors))
        except ValueError as fault:
            raise HeadUnusable(f"the MTP head cannot be read: {fault}") from fault
