"""A layout of MTP heads, and the shapes of their parts by config.json's sizes.

Every size is a Python integer from a hostile file, so nothing here divides by one or allocates by
it.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

from .headers import Tensor

Shape = tuple[int, ...]
Shapes = Iterator[tuple[str, Shape]]
Config = Mapping[str, Any]
HeadTensors = Mapping[str, Tensor]
"""A head's tensors by canonical name: the part of the name after the layout's prefix."""

LayoutName = Literal["qwen", "nextn", "mimo", "ernie", "longcat", "nemotron", "mimo_v2", "step"]

_PARTS = ("gate_proj", "up_proj", "down_proj")


class HeadLayout(ABC):
    """A way to store an MTP head. Shapes are those of an unquantised one."""

    name: ClassVar[LayoutName]
    markers: ClassVar[tuple[str, ...]] = ("",)
    """Beginnings of names of which one must be there if config.json declares no head."""
    ignores_further_layers: ClassVar[bool] = False
    """Whether only the first of a head's layers is read."""

    @abstractmethod
    def canonical(self, tensor: Tensor) -> str | None:
        """The tensor's name in the head; None where it is not of it."""

    @abstractmethod
    def shapes(self, config: "RequiredSizes", tensors: HeadTensors) -> Shapes:
        """Every tensor of the head; copies of the ends where they are there."""

    def reads_fp8(self, config: Config) -> bool:
        """Whether the family takes FP8 blocks."""
        return False


class RequiredSizes(dict[str, Any]):
    """config.json's fields. Those that are read by key must be whole numbers; `get` reads others.

    A field that is none is 0 and noted in `absent`, so that one error can name all of them.
    """

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.absent: list[str] = []

    def __getitem__(self, key: str) -> int:
        value = size(self, key)
        if value is None and key not in self.absent:
            self.absent.append(key)
        return value or 0


def size(config: Config, key: str) -> int | None:
    """A whole number of config.json; None where it is absent or anything else."""
    value: object = config.get(key)
    return value if type(value) is int else None


def joint_shapes(hidden: int, joint: str, *norms: str, layer: str = "") -> Shapes:
    """The projection that joins a head's inputs, the norms around it, and those of `layer`."""
    yield f"{joint}.weight", (hidden, 2 * hidden)
    for norm in (*norms, f"{layer}input_layernorm", f"{layer}post_attention_layernorm"):
        yield f"{norm}.weight", (hidden,)


def nextn_joint_shapes(hidden: int, last_norm: str = "shared_head.norm") -> Shapes:
    """The norms of a NextN head, and the projection that joins its inputs."""
    yield from joint_shapes(hidden, "eh_proj", "enorm", "hnorm", last_norm)


def grouped_attention_shapes(
    prefix: str,
    config: RequiredSizes,
    *,
    query: int = 1,
    width: int | None = None,
    biased: Sequence[str] = (),
    normed: bool = True,
) -> Shapes:
    """`query`: rows of q_proj for one of a query. `width`: of a head, if not config.json's."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    width = width or size(config, "head_dim") or hidden // max(heads, 1)
    rows = {
        "q_proj": query * heads * width,
        "k_proj": config["num_key_value_heads"] * width,
        "v_proj": config["num_key_value_heads"] * width,
        "o_proj": hidden,
    }
    for name, outputs in rows.items():
        yield f"{prefix}{name}.weight", (outputs, heads * width if name == "o_proj" else hidden)
        if name in biased:
            yield f"{prefix}{name}.bias", (outputs,)
    for name in ("q_norm", "k_norm") if normed else ():
        yield f"{prefix}{name}.weight", (width,)


def latent_attention_shapes(prefix: str, config: RequiredSizes, tensors: HeadTensors) -> Shapes:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    latent, rotary = config["kv_lora_rank"], config["qk_rope_head_dim"]
    queries = heads * (config["qk_nope_head_dim"] + rotary)
    values = heads * config["v_head_dim"]
    rank = size(config, "q_lora_rank")
    if rank is None:
        yield f"{prefix}q_proj.weight", (queries, hidden)
    else:
        yield f"{prefix}q_a_proj.weight", (rank, hidden)
        yield f"{prefix}q_a_layernorm.weight", (rank,)
        yield f"{prefix}q_b_proj.weight", (queries, rank)
    yield f"{prefix}kv_a_proj_with_mqa.weight", (latent + rotary, hidden)
    yield f"{prefix}kv_a_layernorm.weight", (latent,)
    if f"{prefix}embed_q.weight" in tensors:  # mlx-lm splits kv_b_proj by head
        yield f"{prefix}embed_q.weight", (heads, latent, config["qk_nope_head_dim"])
        yield f"{prefix}unembed_out.weight", (heads, config["v_head_dim"], latent)
    else:
        yield f"{prefix}kv_b_proj.weight", (heads * config["qk_nope_head_dim"] + values, latent)
    yield f"{prefix}o_proj.weight", (hidden, values)
    if config.get("attention_bias"):
        yield f"{prefix}kv_a_proj_with_mqa.bias", (latent + rotary,)
        yield f"{prefix}o_proj.bias", (hidden,)
        if rank is not None:
            yield f"{prefix}q_a_proj.bias", (rank,)


def indexer_shapes(prefix: str, config: RequiredSizes) -> Shapes:
    """The indexer of DeepSeek-V3.2 and GLM-5, which chooses the rows that attention reads."""
    hidden, heads, width = (config[k] for k in ("hidden_size", "index_n_heads", "index_head_dim"))
    yield f"{prefix}wq_b.weight", (heads * width, config["q_lora_rank"])
    yield f"{prefix}wk.weight", (width, hidden)
    yield f"{prefix}k_norm.weight", (width,)
    yield f"{prefix}k_norm.bias", (width,)
    yield f"{prefix}weights_proj.weight", (heads, hidden)


def gated_shapes(prefix: str, hidden: int, inner: int) -> Shapes:
    for part in _PARTS:
        yield f"{prefix}{part}.weight", (hidden, inner) if part == "down_proj" else (inner, hidden)


def experts_shapes(mlp: str, experts: int, hidden: int, inner: int, tensors: HeadTensors) -> Shapes:
    """Routed experts in the form that is there; one by one where none is."""
    if any(name.startswith(f"{mlp}switch_mlp.") for name in tensors):
        for name, shape in gated_shapes(f"{mlp}switch_mlp.", hidden, inner):
            yield name, (experts, *shape)
        return
    fused = {
        f"{mlp}experts.gate_up_proj": (experts, 2 * inner, hidden),
        f"{mlp}experts.down_proj": (experts, hidden, inner),
    }
    if any(name.startswith(tuple(fused)) for name in tensors):
        for name, shape in fused.items():
            # Raw ones have no suffix; MLX OptiQ quantises them as they are, and adds it.
            suffixed = any(other.startswith(f"{name}.") for other in tensors)
            yield f"{name}.weight" if suffixed else name, shape
        return
    for expert in range(experts):
        yield from gated_shapes(f"{mlp}experts.{expert}.", hidden, inner)
