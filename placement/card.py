"""Model cards: facts about a model that are known before its weights are opened."""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from .config import (
    ENCODERS,
    MAX_CONTEXT,
    MAX_EXPERT_WIDTH,
    MAX_KV_ROW,
    MAX_LAYERS,
    MAX_STREAMS,
    MAX_VOCAB,
    MAX_WIDTH,
)
from .dtype_bytes import BYTES
from .ids import ModelId

MAX_K = 8
"""Drafts a round that a user's card may ask for; a verify that long seldom pays."""
SHIPPED_MAX_K = 7
"""Drafts a round that a card of this package may ask for."""

_STRICT = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)
_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_ID = r"^[^\s\p{C}]([^\p{C}]*[^\s\p{C}])?$"
_SIXTEENTHS_PER_BYTE = 16

Width = Annotated[int, Field(ge=1, le=MAX_WIDTH)]


def _contradiction(field: str, text: str) -> PydanticCustomError:
    """A field that another one excludes; `text` says how, and what to do."""
    return PydanticCustomError("cross_check", "{field} is {text}", {"field": field, "text": text})


class DraftDepth(BaseModel):
    """How many tokens a round drafts."""

    model_config = _STRICT

    default_k: int = Field(ge=1, le=MAX_K)
    """Drafts a round when the request names none, until depths can be compared."""
    max_k: int = Field(ge=1, le=MAX_K)
    """Drafts a round that a request may ask for, and that adaptive depth may reach."""

    @model_validator(mode="after")
    def _default_within_max(self) -> Self:
        if self.max_k < self.default_k:
            low = f"{self.max_k}, below default_k = {self.default_k}"
            raise _contradiction("max_k", f"{low}: raise max_k or lower default_k")
        return self


class NativeMtp(DraftDepth):
    """The declaration that a checkpoint's own multi-token-prediction head may draft."""

    num_layers: int = Field(default=1, ge=1, le=MAX_K)
    """Decoder layers of the head, not drafts a round."""
    draft_vocabulary: int = Field(default=0, ge=0, le=MAX_VOCAB)
    """Only ids below this are drafted, which reads less of lm_head; all if 0. Any is lossless."""
    hidden: Literal["post_norm", "pre_norm"] = "post_norm"
    """The backbone hidden that feeds the head: after its norm, or (DeepSeek, GLM only) before."""


class BlockDrafter(DraftDepth):
    """A checkpoint of its own that drafts for the model, beside its head if it has one."""

    model: ModelId = Field(min_length=1, max_length=200, pattern=_ID)
    """Its id among the models of the node that loads it."""
    default_k: int = Field(default=1, ge=1, le=MAX_K)
    max_k: int = Field(default=SHIPPED_MAX_K, ge=1, le=MAX_K)
    weight_bytes: int = Field(default=0, ge=0, le=2**50)
    """Its tensors; 0 is read from its files, where the node that plans has them."""
    cached_numbers: int = Field(default=0, ge=0, le=2**30)
    """Numbers that one token adds to its caches; 0 as in `weight_bytes`."""


class SamplingDefaults(BaseModel):
    """Sampling parameters of requests that name none; None leaves them to the publisher's
    generation_config.json, and then to the API's own default."""

    model_config = _STRICT

    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=0, le=MAX_VOCAB)
    """0 turns the filter off."""
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, gt=0, le=10)
    """Over the last 20 tokens, unless the request sets their number."""

    @property
    def by_field(self) -> dict[str, float]:
        """The parameters that are set, by the request's fields."""
        return self.model_dump(exclude_none=True)


Capability = Literal["thinking", "thinking_toggle", "tools", "vision", "embeddings"]
"""`thinking_toggle`: a request may turn the thinking off. `embeddings`: it gives the embeddings of
texts, and no answers."""
Pooling = Literal["last", "cls", "mean"]
"""The hidden state that is an embedding: the last token's, the first token's, or their mean."""


class Variant(BaseModel):
    """A published quantisation of the model, in a repository of its own."""

    model_config = _STRICT

    repository: str = Field(max_length=200, pattern=rf"^{_NAME}/{_NAME}$")
    bits: int = Field(ge=2, le=8)
    weight_bytes: int | None = Field(default=None, ge=1, le=2**50)
    """Estimated from the bits if None."""
    mapped_bytes: int | None = Field(default=None, ge=0, le=2**50)
    """The card's share of its bytes if None."""
    head: bool = False
    """It kept the MTP head."""


class ModelCard(BaseModel):
    """Facts about one model, from its config.json or written down by a person."""

    model_config = _STRICT

    id: ModelId = Field(min_length=1, max_length=200, pattern=_ID)
    repository: str | None = Field(default=None, max_length=200, pattern=rf"^{_NAME}/{_NAME}$")
    """On the Hugging Face hub, or None for a model of this machine only."""
    revision: str | None = Field(default=None, max_length=200, pattern=rf"^{_NAME}(/{_NAME})*$")
    # It names a Python module of mlx-lm, so nothing but a plain word may pass.
    model_type: str = Field(max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")
    num_layers: int = Field(ge=1, le=MAX_LAYERS)
    hidden_size: Width
    hidden_streams: int = Field(default=1, ge=1, le=MAX_STREAMS)
    """The hidden states that layers pass on side by side, each `hidden_size` wide."""
    vocab_size: int = Field(ge=1, le=MAX_VOCAB)
    num_attention_layers: int = Field(ge=0, le=MAX_LAYERS)
    """Layers that hold a KV cache."""
    num_key_value_heads: Width
    head_dim: Width
    """Width of a key; with latent attention `kv_row_width` decides about the cache."""
    kv_row_width: int = Field(default=0, ge=0, le=MAX_KV_ROW)
    """Numbers that one token adds to one layer's cache, or 0 for a key and a value a KV head."""
    context_length: int = Field(ge=1, le=MAX_CONTEXT)
    """Tokens, prompt and answer together."""
    weight_bytes: int = Field(ge=1, le=2**50)
    """The whole checkpoint's tensors, as downloaded."""
    mapped_bytes: int = Field(default=0, ge=0, le=2**50)
    """The part of `weight_bytes` in tables whose rows are read from the disk when needed."""
    tie_word_embeddings: bool = False
    num_experts: int = Field(default=0, ge=0, le=MAX_WIDTH)
    """Routed experts a layer, or 0 for a dense model."""
    num_experts_per_tok: int = Field(default=0, ge=0, le=MAX_WIDTH)
    """Counted as all of them if 0."""
    moe_intermediate_size: int = Field(default=0, ge=0, le=MAX_EXPERT_WIDTH)
    """Width of one routed expert, which counts as the whole layer if this is 0."""
    num_dense_layers: int = Field(default=0, ge=0, le=MAX_LAYERS)
    """Layers of a mixture that have no experts."""
    quantization: int | None = Field(default=None, ge=1, le=8)
    """Bits a weight in memory, or None for `dtype`."""
    fp8: bool = False
    """The file holds its matrices in FP8 blocks, which mlx-lm turns into `dtype` on load."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    kv_bits: Literal[4, 8] | None = None
    """Bits a number in attention's caches, by mlx-lm's quantisation of keys and values; None:
    `dtype`. It changes the answers."""
    native_mtp: NativeMtp | None = None
    drafter: BlockDrafter | None = None
    """A checkpoint that drafts for this model and its variants, beside the head."""
    sampling: SamplingDefaults = SamplingDefaults()
    capabilities: tuple[Capability, ...] = Field(default=(), strict=False, max_length=8)
    """The abilities of the model. Lists add those that its chat template shows once it is here."""
    pooling: Pooling | None = None
    """The hidden state that is an embedding. None is a decoder's last, and unknown of encoders."""
    variants: tuple[Variant, ...] = Field(default=(), strict=False, max_length=32)

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        for part, whole in (
            ("num_attention_layers", "num_layers"),
            ("num_experts_per_tok", "num_experts"),
            ("num_dense_layers", "num_layers"),
        ):
            has, limit = getattr(self, part), getattr(self, whole)
            if has > limit:
                raise _contradiction(part, f"{has}, above {whole} = {limit}: lower it")
        if self.fp8 and self.quantization is not None:
            both = f"true beside quantization = {self.quantization}"
            raise _contradiction("fp8", f"{both}: remove one of them")
        if self.kv_bits is not None and (why := self.kv_refusal):
            raise _contradiction("kv_bits", f"{self.kv_bits}, and {why}: remove it")
        return self

    @property
    def drafts(self) -> BlockDrafter | NativeMtp | None:
        """The drafter that the card names, else the model's own head."""
        return self.drafter or self.native_mtp

    @property
    def kv_refusal(self) -> str:
        """Why attention's caches cannot be quantised; empty where only a load can show that."""
        if self.kv_row_width:
            return "kv_row_width says that this model's attention keeps no plain keys and values"
        if not self.kv_group_size:
            return f"head_dim is {self.head_dim}, which groups of 32 numbers do not divide"
        return "" if self.num_attention_layers else "num_attention_layers is 0"

    @property
    def kv_group_size(self) -> int:
        """Numbers that share a scale and a bias in quantised caches, or 0 if no size fits."""
        return next((size for size in (64, 32) if self.head_dim % size == 0), 0)

    @property
    def embeds(self) -> bool:
        """Whether it gives embeddings instead of answers."""
        return "embeddings" in self.capabilities

    @property
    def embeds_by(self) -> Pooling | Literal[""]:
        """The pooling of an embedder; empty for other models, and where an encoder has none."""
        if not self.embeds:
            return ""
        return self.pooling or ("" if self.model_type in ENCODERS else "last")

    @property
    def hidden_bytes(self) -> int:
        """One row of the hidden state, as a stage sends it to the next."""
        return self.hidden_width * BYTES[self.dtype]

    @property
    def hidden_width(self) -> int:
        """Numbers of one row of the hidden state between layers."""
        return self.hidden_size * self.hidden_streams

    @property
    def kv_bytes_per_layer_token(self) -> int:
        """Bytes that one token adds to the cache of one attention layer."""
        if self.kv_bits is None:
            return self.kv_bytes_per_head_token
        # Of each group a scale and a bias in `dtype` beside the numbers.
        row = 2 * self.num_key_value_heads * self.head_dim
        groups = row // self.kv_group_size
        return row * self.kv_bits // 8 + groups * 2 * BYTES[self.dtype]

    @property
    def kv_bytes_per_head_token(self) -> int:
        """Bytes that one token adds to a layer of the draft head, whose cache is not quantised."""
        row = self.kv_row_width or 2 * self.num_key_value_heads * self.head_dim
        return row * BYTES[self.dtype]

    @property
    def memory_bytes(self) -> int:
        """The checkpoint's tensors once they are loaded: FP8 grows to `dtype` there.

        Never too few: all but the ends counts as FP8, so its scales and the norms grow too.
        """
        in_memory = self.weight_bytes - self.mapped_bytes
        if not self.fp8:
            return in_memory
        ends = min(self.endpoint_bytes, in_memory)  # no publisher stores these in FP8
        return ends + (in_memory - ends) * BYTES[self.dtype]

    @property
    def embedding_bytes(self) -> int:
        """The token embeddings, or lm_head (estimate: quantised like the rest)."""
        return self._stored(self.vocab_size * self.hidden_size)

    @property
    def endpoint_bytes(self) -> int:
        """Embeddings and lm_head as the generator holds them: one matrix when tied."""
        return self.embedding_bytes * (1 if self.tie_word_embeddings else 2)

    @property
    def mean_layer_bytes(self) -> int:
        """Weights of one backbone layer (estimate: the checkpoint less its ends, shared evenly).

        Rounded up, and a vision tower is counted in, so layers, ends and head never sum to less
        than the checkpoint. A mixture's dense layers weigh less than this and its others more
        (DeepSeek-V3's by 5 %), which a stage's headroom covers.
        """
        mtp = self.native_mtp
        body = self.memory_bytes - self.endpoint_bytes - self._fusion_bytes
        plain, stored = self._sixteenths
        # The head keeps `dtype` under a quantised backbone: each of its layers weighs plain/stored.
        shares = self.num_layers * stored + (mtp.num_layers * plain if mtp else 0)
        return max(1, -(-body * stored // shares))

    @property
    def active_layer_bytes(self) -> int:
        """Weights of a mean layer that a token reads: of the routed experts, only those chosen."""
        layer, chosen = self.mean_layer_bytes, self.num_experts_per_tok
        if not self.num_experts or not chosen:
            return layer
        expert = 3 * self.hidden_size * self.moe_intermediate_size  # gate, up and down
        experts = self._stored(self.num_experts * expert) if expert else layer
        mixtures = self.num_layers - self.num_dense_layers
        routed = min(layer, experts * mixtures // self.num_layers)
        return max(1, layer - routed * (self.num_experts - chosen) // self.num_experts)

    @property
    def mtp_bytes(self) -> int:
        """The MTP head's own weights (it shares embeddings and lm_head); 0 when not declared."""
        if self.native_mtp is None:
            return 0
        plain, stored = self._sixteenths
        layers = -(-self.native_mtp.num_layers * self.mean_layer_bytes * plain // stored)
        return layers + self._fusion_bytes

    @property
    def draft_bytes(self) -> int:
        """The weights of what may draft."""
        return self.mtp_bytes + (self.drafter.weight_bytes if self.drafter else 0)

    @property
    def draft_bytes_per_token(self) -> int:
        """Bytes that one token adds to the caches of what may draft."""
        layers = self.native_mtp.num_layers if self.native_mtp else 0
        numbers = self.drafter.cached_numbers if self.drafter else 0
        return layers * self.kv_bytes_per_head_token + numbers * BYTES[self.dtype]

    def as_variant(self, variant: Variant) -> "ModelCard":
        """The card of one of `variants`: the same model in another format."""
        stored = _SIXTEENTHS_PER_BYTE if self.fp8 else self._sixteenths[1]
        size = variant.weight_bytes or self.weight_bytes * (2 * variant.bits + 1) // stored
        changes = {
            "id": variant.repository,
            "repository": variant.repository,
            "revision": None,
            "weight_bytes": size,
            "mapped_bytes": self.mapped_bytes * size // self.weight_bytes
            if variant.mapped_bytes is None
            else variant.mapped_bytes,
            "quantization": variant.bits,
            "fp8": False,
            "native_mtp": self.native_mtp if variant.head else None,
            "variants": (),
        }
        return self.model_copy(update=changes)

    def computed_in(self, dtype: str) -> "ModelCard":
        """The card of what is in memory where the model is computed in `dtype`: weights, caches and
        hidden states take its bytes. Its `weight_bytes` are no download's."""
        if dtype == self.dtype:
            return self
        facts: dict[str, object] = {"dtype": dtype, "fp8": False, "mapped_bytes": 0}
        new, old = BYTES[dtype], BYTES[self.dtype]
        if self.drafter is not None:
            size = self.drafter.weight_bytes * new // old
            facts["drafter"] = self.drafter.model_copy(update={"weight_bytes": size})
        if self.quantization is None:
            return self.model_copy(update={**facts, "weight_bytes": self.memory_bytes * new // old})
        # Scales and the head change, the quantised numbers do not.
        stored, head = self._sixteenths[1], self.mtp_bytes
        grown = stored - old // 2 + new // 2
        size = -(-max(0, self.memory_bytes - head) * grown // stored) + head * new // old
        return self.model_copy(update={**facts, "weight_bytes": size})

    @property
    def _sixteenths(self) -> tuple[int, int]:
        """Sixteenths of a byte that one weight takes: (in `dtype`, as stored)."""
        plain = _SIXTEENTHS_PER_BYTE * BYTES[self.dtype]
        # A quantised group of 64 weights has a scale and a bias in `dtype`.
        scales = BYTES[self.dtype] // 2
        return plain, plain if self.quantization is None else 2 * self.quantization + scales

    @property
    def _fusion_bytes(self) -> int:
        """The head's `fc`, 2 * hidden -> hidden, in `dtype`."""
        return 0 if self.native_mtp is None else 2 * self.hidden_size**2 * BYTES[self.dtype]

    def _stored(self, weights: int) -> int:
        return -(-weights * self._sixteenths[1] // _SIXTEENTHS_PER_BYTE)
