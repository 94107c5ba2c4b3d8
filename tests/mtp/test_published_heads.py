"""Heads in their published layouts, against a forward in NumPy.

No file of these models was read: names and order are those of vLLM's loaders for them, and the
weights here are random.
"""

import functools
import json
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest
from driven import driven
from engines import answer, engine_of, load_quietly, request, spec
from families import made_family, stage_of
from models import WINDOW, make_checkpoint
from models import Family as Name
from readers import Reader
from small import PROMPT, fit_head

from exo_node.mtp.families.family import Family, draft_logits
from exo_node.mtp.families.head import HeadSource, HeadUnusable, HiddenKind
from exo_node.mtp.families.weights import fill_head, load_head
from exo_node.shard.checkpoint.checkpoint import read_checkpoint
from exo_node.shard.checkpoint.head_tensors import HeadFound, HeadMissing, find_head
from exo_node.shard.engine.answers.text_engine import TextEngine

Array = np.ndarray[Any, np.dtype[np.float64]]
LAYERS = 4
EPS = 1e-6
NAMES: tuple[Name, ...] = (
    "glm4_moe_lite",
    "deepseek_v32",
    "glm_moe_dsa",
    "mimo",
    "ernie4_5",
    "ernie4_5_moe",
    "longcat_flash",
    "nemotron_h",
    "mimo_v2_flash",
    "step3p5",
)
KINDS: list[tuple[Name, HiddenKind]] = [
    ("glm4_moe_lite", "post_norm"),
    ("glm4_moe_lite", "pre_norm"),
    ("deepseek_v32", "post_norm"),
    ("deepseek_v32", "pre_norm"),
    ("glm_moe_dsa", "post_norm"),
    ("mimo", "post_norm"),
    ("ernie4_5", "post_norm"),
    ("ernie4_5_moe", "post_norm"),
    ("ernie4_5_moe", "pre_norm"),
    ("longcat_flash", "post_norm"),
    ("nemotron_h", "post_norm"),
    ("mimo_v2_flash", "post_norm"),
    ("step3p5", "pre_norm"),
    ("step3p5", "post_norm"),
]
IDS = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38]
ATOL = 2e-4
_KEPT = tempfile.TemporaryDirectory(prefix="exo-published-")


@functools.cache
def checkpoint(name: Name, *, fitted: bool = False) -> Path:
    """As published; `fitted`: a head that drafts right now and then, and a tokenizer."""
    folder = Path(_KEPT.name) / f"{name}-{fitted}"
    _ = make_checkpoint(folder, name, dtype="float32", vocab=4096 if fitted else 128)
    if fitted:
        fit_head(folder)
    return folder


@dataclass(frozen=True)
class Reference:
    """The model and its head by their published tensors, without caches."""

    tensors: dict[str, Array]
    config: dict[str, Any]

    @classmethod
    def of(cls, folder: Path) -> "Reference":
        stored = cast("dict[str, mx.array]", mx.load(str(folder / "model.safetensors")))
        tensors = {name: np.array(value, dtype=np.float64) for name, value in stored.items()}
        return cls(tensors, json.loads((folder / "config.json").read_text()))

    @property
    def is_nemotron(self) -> bool:
        return self.config["model_type"] == "nemotron_h"

    def embed(self, ids: Sequence[int]) -> Array:
        name = "backbone.embeddings" if self.is_nemotron else "model.embed_tokens"
        return self.tensors[f"{name}.weight"][list(ids)]

    def hidden(self, ids: Sequence[int]) -> Array:
        """Before the final norm."""
        x = self.embed(ids)
        for layer in range(LAYERS):
            at = f"{'backbone' if self.is_nemotron else 'model'}.layers.{layer}."
            x = self._layer(x, at)
        return x

    def normed(self, x: Array) -> Array:
        return self._norm(x, "backbone.norm_f" if self.is_nemotron else "model.norm")

    def lm_head(self, x: Array) -> Array:
        return x @ self.tensors["lm_head.weight"].T

    def head(
        self, hidden: Array, following: Sequence[int], kind: HiddenKind
    ) -> tuple[Array, Array]:
        """What takes the place of the hidden states at the next depth, and the draft logits."""
        e = self.embed(following)
        if self.config["model_type"] == "mimo":
            at = "model.mtp_layers.0."
            h, e = (
                self._norm(hidden, f"{at}hidden_layernorm"),
                self._norm(e, f"{at}token_layernorm"),
            )
            x = np.concatenate([h, e], axis=-1) @ self.tensors[f"{at}input_proj.weight"].T
            y = self._norm(self._layer(x, at), f"{at}final_layernorm")
            return y, self.lm_head(y)
        h_norm, e_norm, joint, layer, last = self._head_names()
        h, e = self._norm(hidden, h_norm), self._norm(e, e_norm)
        x = np.concatenate([e, h], axis=-1) @ self.tensors[f"{joint}.weight"].T
        x = self._layer(x, layer)
        if self.is_nemotron:
            x = self._layer(x, "mtp.layers.1.")
        y = self._norm(x, last)
        return (y if kind == "post_norm" else x), self.lm_head(y)

    def _head_names(self) -> tuple[str, str, str, str, str]:
        """Of both norms, the projection, the decoder layer and the final norm."""
        if self.config["model_type"].startswith("ernie"):
            norms = "model.mtp_hidden_norm.0", "model.mtp_emb_norm.0"
            return *norms, "model.mtp_linear_proj.0", "model.mtp_block.0.", "model.norm"
        if self.config["model_type"] == "longcat_flash":
            at = "model.mtp.layers.0."
            return f"{at}hnorm.m", f"{at}enorm.m", f"{at}eh_proj", at, "model.mtp.norm"
        if self.config["model_type"] == "mimo_v2_flash":
            at = "model.mtp.layers.0."
            return f"{at}hnorm", f"{at}enorm", f"{at}eh_proj", at, f"{at}final_layernorm"
        if self.config["model_type"] == "step3p5":
            at = f"model.layers.{LAYERS}."
            last = f"{at}transformer.shared_head.norm"
            return f"{at}hnorm", f"{at}enorm", f"{at}eh_proj", at, last
        if self.is_nemotron:
            at = "mtp.layers.0."
            return f"{at}hnorm", f"{at}enorm", f"{at}eh_proj", at, "mtp.layers.1.final_layernorm"
        at = f"model.layers.{LAYERS}."
        return f"{at}hnorm", f"{at}enorm", f"{at}eh_proj", at, f"{at}shared_head.norm"

    def _norm(self, x: Array, name: str) -> Array:
        weight = self.tensors[f"{name}.weight"] + (self.config["model_type"] == "step3p5")
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * weight

    def _linear(self, x: Array, name: str) -> Array:
        bias = self.tensors.get(f"{name}.bias")
        out = x @ self.tensors[f"{name}.weight"].T
        return out if bias is None else out + bias

    def _layer(self, x: Array, at: str) -> Array:
        if f"{at}self_attn.0.o_proj.weight" in self.tensors:
            return self._double_layer(x, at)
        if self.is_nemotron:
            return x + self._block(self._norm(x, f"{at}norm"), f"{at}mixer.")
        if self.config["model_type"] in ("mimo_v2_flash", "step3p5"):
            return self._layer_with_window(x, at)
        normed = self._norm(x, f"{at}input_layernorm")
        is_latent = f"{at}self_attn.kv_b_proj.weight" in self.tensors
        attention = self._latent_attention if is_latent else self._grouped_attention
        x = x + attention(normed, f"{at}self_attn.")
        normed = self._norm(x, f"{at}post_attention_layernorm")
        if f"{at}transformer_layer.mlp.up_proj.weight" in self.tensors:
            return x + self._mlp(normed, f"{at}transformer_layer.mlp.")
        is_mixture = f"{at}mlp.gate.weight" in self.tensors
        return x + (self._mixture if is_mixture else self._mlp)(normed, f"{at}mlp.")

    def _layer_with_window(self, x: Array, at: str) -> Array:
        """MiMo-V2's and Step's: a window in all layers but the first."""
        is_step, is_full = self.config["model_type"] == "step3p5", at == "model.layers.0."
        x = x + self._window_attention(
            self._norm(x, f"{at}input_layernorm"), f"{at}self_attn.", is_step=is_step, full=is_full
        )
        is_last = f"{at}pre_mlp_layernorm.weight" in self.tensors
        normed = self._norm(x, f"{at}{'pre_mlp' if is_last else 'post_attention'}_layernorm")
        if is_step and f"{at}moe.gate.weight" in self.tensors:
            return x + self._step_mixture(normed, at)
        if f"{at}mlp.gate.weight" in self.tensors:
            return x + self._mixture(normed, f"{at}mlp.")
        return x + self._mlp(normed, f"{at}mlp.")

    def _window_attention(self, x: Array, at: str, *, is_step: bool, full: bool) -> Array:
        heads, groups, rows = 4, 2 if full else 4, len(x)
        split = {
            name: self._linear(x, f"{at}{name}_proj").reshape(rows, count, -1).transpose(1, 0, 2)
            for name, count in (("q", heads), ("k", groups), ("v", groups))
        }
        q, k, v = split["q"], split["k"], split["v"]
        if is_step:
            q, k = self._norm(q, f"{at}q_norm"), self._norm(k, f"{at}k_norm")
        turned = q.shape[-1] // 2 if full or not is_step else q.shape[-1]
        q, k = (
            np.concatenate([rotated(part[..., :turned]), part[..., turned:]], axis=-1)
            for part in (q, k)
        )
        k, v = (np.repeat(part, heads // groups, axis=0) for part in (k, v))
        scores = q @ k.transpose(0, 2, 1) / np.sqrt(q.shape[-1])
        ago = np.subtract.outer(np.arange(rows), np.arange(rows))
        if not full:
            scores = np.where(ago < WINDOW, scores, -np.inf)
        sink = self.tensors.get(f"{at}attention_sink_bias")
        if sink is not None:
            scores = np.where(ago >= 0, scores, -np.inf)
            shares = np.exp(scores)
            weights = shares / (shares.sum(-1, keepdims=True) + np.exp(sink)[:, None, None])
        else:
            weights = attended(scores)
        out = (weights @ (v if is_step else v * 0.7)).transpose(1, 0, 2)
        if is_step:
            out = out / (1 + np.exp(-self._linear(x, f"{at}g_proj")))[..., None]
        return self._linear(out.reshape(rows, -1), f"{at}o_proj")

    def _step_mixture(self, x: Array, at: str) -> Array:
        scores = 1 / (1 + np.exp(-self._linear(x, f"{at}moe.gate")))
        biased = scores + self.tensors[f"{at}moe.router_bias"]
        out = self._mlp(x, f"{at}share_expert.")
        gates, ups, downs = (
            self.tensors[f"{at}moe.{name}_proj.weight"] for name in ("gate", "up", "down")
        )
        for row, order in enumerate(np.argsort(-biased)):
            chosen = order[:2]
            weights = scores[row, chosen] / scores[row, chosen].sum()
            for expert, weight in zip(chosen, weights, strict=True):
                inner = silu(gates[expert] @ x[row]) * (ups[expert] @ x[row])
                out[row] += weight * 1.5 * (downs[expert] @ inner)
        return out

    def _block(self, x: Array, at: str) -> Array:
        """Nemotron's: one of three kinds."""
        if f"{at}A_log" in self.tensors:
            return self._mamba(x, at)
        is_mixture = f"{at}gate.weight" in self.tensors
        return (self._latent_mixture if is_mixture else self._grouped_attention)(x, at)

    def _mamba(self, x: Array, at: str) -> Array:
        heads, width = self.config["mamba_num_heads"], self.config["mamba_head_dim"]
        groups, size = self.config["n_groups"], self.config["ssm_state_size"]
        inner, rows = heads * width, len(x)
        gate, mixed, dt = np.split(
            self._linear(x, f"{at}in_proj"), [inner, 2 * (inner + groups * size)], axis=-1
        )
        kernel = self.tensors[f"{at}conv1d.weight"][:, 0]  # (channels, taps)
        padded = np.pad(mixed, [(kernel.shape[1] - 1, 0), (0, 0)])
        mixed = sum(padded[i : i + rows] * kernel[:, i] for i in range(kernel.shape[1]))
        mixed = silu(mixed + self.tensors[f"{at}conv1d.bias"])
        values, b, c = np.split(mixed, [inner, inner + groups * size], axis=-1)
        values = values.reshape(rows, heads, width)
        b, c = (
            np.repeat(part.reshape(rows, groups, size), heads // groups, axis=1) for part in (b, c)
        )
        dt = np.log1p(np.exp(dt + self.tensors[f"{at}dt_bias"]))
        decay = np.exp(-np.exp(self.tensors[f"{at}A_log"]) * dt)
        state, out = np.zeros((heads, width, size)), np.empty((rows, heads, width))
        for row in range(rows):
            new = (dt[row][:, None] * values[row])[:, :, None] * b[row][:, None]
            state = decay[row][:, None, None] * state + new
            out[row] = (state @ c[row][:, :, None])[..., 0]
        out += self.tensors[f"{at}D"][:, None] * values
        gated = out.reshape(rows, inner) * silu(gate)
        parts = gated.reshape(rows, groups, -1)
        parts = parts / np.sqrt((parts * parts).mean(-1, keepdims=True) + EPS)
        normed = parts.reshape(rows, inner) * self.tensors[f"{at}norm.weight"]
        return self._linear(normed, f"{at}out_proj")

    def _latent_mixture(self, x: Array, at: str) -> Array:
        scores = 1 / (1 + np.exp(-self._linear(x, f"{at}gate")))
        biased = scores + self.tensors[f"{at}gate.e_score_correction_bias"]
        latent = self._linear(x, f"{at}fc1_latent_proj")
        mixed = np.zeros_like(latent)
        for row, order in enumerate(np.argsort(-biased)):
            chosen = order[: self.config["num_experts_per_tok"]]
            weights = scores[row, chosen] / scores[row, chosen].sum()
            for expert, weight in zip(chosen, weights, strict=True):
                part = self._squared(latent[row : row + 1], f"{at}experts.{expert}.")[0]
                mixed[row] += weight * self.config["routed_scaling_factor"] * part
        mixed = self._linear(mixed, f"{at}fc2_latent_proj")
        return mixed + self._squared(x, f"{at}shared_experts.")

    def _squared(self, x: Array, at: str) -> Array:
        return self._linear(
            np.square(np.maximum(self._linear(x, f"{at}up_proj"), 0)), f"{at}down_proj"
        )

    def _double_layer(self, x: Array, at: str) -> Array:
        """LongCat's: two attentions and MLPs, and experts from the first to the end."""
        beside = np.zeros_like(x)
        for i in range(2):
            normed = self._norm(x, f"{at}input_layernorm.{i}")
            x = x + self._latent_attention(normed, f"{at}self_attn.{i}.")
            normed = self._norm(x, f"{at}post_attention_layernorm.{i}")
            if i == 0:
                beside = self._mixture(normed, f"{at}mlp.")
            x = x + self._mlp(normed, f"{at}mlps.{i}.")
        return x + beside

    def _grouped_attention(self, x: Array, at: str) -> Array:
        heads, groups = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        rows = len(x)

        def split(name: str, count: int) -> Array:
            return self._linear(x, f"{at}{name}").reshape(rows, count, -1).transpose(1, 0, 2)

        pairs = self.config["model_type"].startswith("ernie")
        q, k = split("q_proj", heads), split("k_proj", groups)
        if not self.is_nemotron:
            q, k = (rotated(part, pairs=pairs) for part in (q, k))
        k, v = (np.repeat(part, heads // groups, axis=0) for part in (k, split("v_proj", groups)))
        out = attended(q @ k.transpose(0, 2, 1) / np.sqrt(q.shape[-1])) @ v
        return self._linear(out.transpose(1, 0, 2).reshape(rows, -1), f"{at}o_proj")

    def _latent_attention(self, x: Array, at: str) -> Array:
        heads, rows = self.config["num_attention_heads"], len(x)
        nope, rope = self.config["qk_nope_head_dim"], self.config["qk_rope_head_dim"]
        low = self._norm(self._linear(x, f"{at}q_a_proj"), f"{at}q_a_layernorm")
        q = self._linear(low, f"{at}q_b_proj").reshape(rows, heads, -1).transpose(1, 0, 2)
        latent = self._linear(x, f"{at}kv_a_proj_with_mqa")
        latent, k_pe = latent[:, : self.config["kv_lora_rank"]], latent[:, -rope:]
        latent = self._norm(latent, f"{at}kv_a_layernorm")
        if self.config.get("mla_scale_kv_lora"):
            hidden = self.config["hidden_size"]
            q = q * np.sqrt(hidden / self.config["q_lora_rank"])
            latent = latent * np.sqrt(hidden / self.config["kv_lora_rank"])
        kv = self._linear(latent, f"{at}kv_b_proj").reshape(rows, heads, -1).transpose(1, 0, 2)
        scores = q[..., :nope] @ kv[..., :nope].transpose(0, 2, 1)
        q_pe, k_pe = (rotated(part, pairs=True) for part in (q[..., nope:], k_pe[None]))
        scores = (scores + q_pe @ k_pe.transpose(0, 2, 1)) / np.sqrt(nope + rope)
        if f"{at}indexer.wk.weight" in self.tensors:
            scores = np.where(self._chosen(x, low, f"{at}indexer."), scores, -np.inf)
        out = attended(scores) @ kv[..., nope:]
        return self._linear(out.transpose(1, 0, 2).reshape(rows, -1), f"{at}o_proj")

    def _chosen(self, x: Array, low: Array, at: str) -> Array:
        """(rows, rows): whether a row attends to another."""
        rows, width = len(x), self.config["index_head_dim"]
        pairs, rope = self.config["model_type"] == "glm_moe_dsa", self.config["qk_rope_head_dim"]
        q = self._linear(low, f"{at}wq_b").reshape(rows, -1, width).transpose(1, 0, 2)
        k = self._linear(x, f"{at}wk")
        k = (k - k.mean(-1, keepdims=True)) / np.sqrt(k.var(-1, keepdims=True) + 1e-5)
        k = k * self.tensors[f"{at}k_norm.weight"] + self.tensors[f"{at}k_norm.bias"]
        q, k = (
            np.concatenate([rotated(part[..., :rope], pairs=pairs), part[..., rope:]], axis=-1)
            for part in (q, k[None])
        )
        weights = self._linear(x, f"{at}weights_proj").T[:, :, None]
        scores = (np.maximum(q @ k.transpose(0, 2, 1), 0) * weights).sum(0)
        scores = np.where(np.tri(rows, dtype=bool), scores, -np.inf)
        chosen = np.zeros((rows, rows), dtype=bool)
        for row, best in enumerate(np.argsort(-scores, axis=-1)[:, : self.config["index_topk"]]):
            chosen[row, best] = True
        return chosen

    def _mlp(self, x: Array, at: str) -> Array:
        gate = self._linear(x, f"{at}gate_proj")
        return self._linear(
            gate / (1 + np.exp(-gate)) * self._linear(x, f"{at}up_proj"), f"{at}down_proj"
        )

    def _mixture(self, x: Array, at: str) -> Array:
        if self.config["model_type"] in ("ernie4_5_moe", "longcat_flash"):
            return self._softmax_mixture(x, at)
        scores = 1 / (1 + np.exp(-self._linear(x, f"{at}gate")))
        biased = scores + self.tensors[f"{at}gate.e_score_correction_bias"]
        scale = self.config["routed_scaling_factor"] or 1.0
        is_shared = f"{at}shared_experts.up_proj.weight" in self.tensors
        out = self._mlp(x, f"{at}shared_experts.") if is_shared else np.zeros_like(x)
        for row in range(len(x)):
            chosen = np.argsort(-biased[row])[: self.config["num_experts_per_tok"]]
            weights = scores[row, chosen] / scores[row, chosen].sum()
            for expert, weight in zip(chosen, weights, strict=True):
                part = self._mlp(x[row : row + 1], f"{at}experts.{expert}.")[0]
                out[row] += weight * scale * part
        return out

    def _softmax_mixture(self, x: Array, at: str) -> Array:
        """The experts of Ernie and of LongCat, whose last ones give back what they get."""
        is_ernie = self.config["model_type"] == "ernie4_5_moe"
        logits = self._linear(x, f"{at}gate" if is_ernie else f"{at}router.classifier")
        scores = np.exp(logits - logits.max(-1, keepdims=True))
        scores = scores / scores.sum(-1, keepdims=True)
        bias = 0.0 if is_ernie else self.tensors[f"{at}router.e_score_correction_bias"]
        out = self._mlp(x, f"{at}shared_experts.") if is_ernie else np.zeros_like(x)
        chosen = np.argsort(-(scores + bias))[:, : self.config["moe_k" if is_ernie else "moe_topk"]]
        for row, experts in enumerate(chosen):
            weights = scores[row, experts]
            weights = weights * (1 / weights.sum() if is_ernie else 1.5)
            for expert, weight in zip(experts, weights, strict=True):
                is_identity = not is_ernie and expert >= self.config["n_routed_experts"]
                one = x[row : row + 1]
                part = one if is_identity else self._mlp(one, f"{at}experts.{expert}.")
                out[row] += weight * part[0]
        return out


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def rotated(x: Array, *, pairs: bool = False) -> Array:
    """Rotary positions of rows 0, 1, … in (heads, rows, width); `pairs`: of adjacent numbers."""
    width = x.shape[-1]
    exponents = np.arange(0, width, 2, dtype=np.float64) / width
    angles = np.outer(np.arange(x.shape[1], dtype=np.float64), np.power(10000.0, -exponents))
    cos, sin = cast(Array, np.cos(angles)), cast(Array, np.sin(angles))
    middle = width // 2
    halves = (
        (slice(0, None, 2), slice(1, None, 2)) if pairs else (slice(middle), slice(middle, None))
    )
    a, b = (x[..., half] for half in halves)
    out = np.empty_like(x)
    out[..., halves[0]], out[..., halves[1]] = a * cos - b * sin, a * sin + b * cos
    return out


def attended(scores: Array) -> Array:
    """Causal softmax."""
    rows = scores.shape[-1]
    scores = np.where(np.tri(rows, dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def close(got: mx.array, expected: Array) -> bool:
    return np.allclose(cast(Array, np.array(got[0])), expected, rtol=0, atol=ATOL)


def opened(name: Name, kind: HiddenKind) -> tuple[Family, Any, list[Any]]:
    folder = checkpoint(name)
    stage = stage_of(folder, LAYERS)
    family = made_family(stage, kind)
    head = find_head(read_checkpoint(folder))
    assert isinstance(head, HeadFound), head
    stored = cast("dict[str, mx.array]", mx.load(str(folder / "model.safetensors")))
    tensors = {canonical: stored[tensor.name] for canonical, tensor in head.tensors.items()}
    return family, load_head(family, HeadSource(tensors, None), mx.float32), stage.make_caches()


@pytest.mark.smoke
@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_model_and_head_compute_what_the_published_tensors_say(
    name: Name, kind: HiddenKind
) -> None:
    reference = Reference.of(checkpoint(name))
    family, head, caches = opened(name, kind)
    ids, following = IDS[:-1], IDS[1:]
    hidden = family.hidden(mx.array([ids]), caches)
    x = reference.hidden(ids)
    assert close(family.logits(hidden), reference.lm_head(reference.normed(x)))
    logits_of, cache = draft_logits(family, head), head.make_cache()
    output = head(hidden, family.embed(mx.array([following])), cache)
    rows = reference.normed(x) if kind == "post_norm" else x
    chained, expected = reference.head(rows, following, kind)
    assert close(logits_of(output), expected)
    for token in (7, 11):  # two drafts further, each after the head's own output
        output = head(output[:, -1:], family.embed(mx.array([[token]])), cache)
        rows, following = np.concatenate([rows, chained[-1:]]), [*following, token]
        chained, expected = reference.head(rows, following, kind)
        assert close(logits_of(output), expected[-1:])


@functools.cache
def engine(name: Name) -> TextEngine:
    folder = checkpoint(name, fitted=True)
    fields = {"num_layers": LAYERS, "native_mtp": True, "max_draft_tokens": 7}
    stage_spec = spec(folder, 0, LAYERS, **fields)
    loaded = load_quietly(stage_spec)
    assert loaded.head_state == "loaded"
    return engine_of(loaded, stage_spec)


@pytest.mark.parametrize("k", [1, 2, 3, 7])
@pytest.mark.parametrize("name", NAMES)
def test_greedy_answers_are_those_without_drafts(name: Name, k: int) -> None:
    plain = answer(engine(name), request(PROMPT, 0, 48, ignore_eos=True))
    drafted = answer(engine(name), request(PROMPT, k, 48, ignore_eos=True))
    assert drafted.ids == plain.ids
    assert 0 < drafted.stats.accepted_draft_tokens < drafted.stats.proposed_draft_tokens


@pytest.mark.parametrize("name", NAMES)
def test_answers_in_a_batch_are_those_without_drafts(name: Name) -> None:
    prompts = [[*PROMPT, *range(7, 7 + 5 * i)] for i in range(3)]
    plain = [answer(engine(name), request(each, 0, 40, ignore_eos=True)).ids for each in prompts]
    readers = [
        Reader(request(each, (1, 7, 3)[i], 40, ignore_eos=True), begins=4 * i)
        for i, each in enumerate(prompts)
    ]
    served = engine(name)
    served.measurements.measure()
    driven(served, readers)
    assert served.measurements.batch_identity in ("bitwise", "near_tie"), (
        served.measurements.batch_identity
    )
    assert max(r.forward.batch for each in readers for r in each.rounds) == 3
    assert [tuple(each.ids) for each in readers] == plain


@pytest.mark.parametrize(
    ("name", "layout", "tensor", "lacks"),
    [
        ("glm4_moe_lite", "nextn", "self_attn.kv_b_proj.weight", "self_attn.embed_q.weight"),
        ("mimo", "mimo", "input_proj.weight", ""),
        ("glm_moe_dsa", "nextn", "self_attn.indexer.wk.weight", ""),
        ("ernie4_5_moe", "ernie", "mtp_block.0.mlp.up_proj.weight", ""),
        ("longcat_flash", "longcat", "self_attn.o_proj.weight", ""),
        ("nemotron_h", "nemotron", "layers.1.mixer.experts.3.up_proj.weight", ""),
        ("mimo_v2_flash", "mimo_v2", "self_attn.v_proj.weight", ""),
        ("step3p5", "step", "self_attn.g_proj.weight", ""),
    ],
)
def test_a_head_is_filled_whole_or_the_missing_tensor_is_named(
    name: Name, layout: str, tensor: str, lacks: str
) -> None:
    head = find_head(read_checkpoint(checkpoint(name)))
    assert isinstance(head, HeadFound)
    assert head.layout == layout
    stored = cast("dict[str, mx.array]", mx.load(str(checkpoint(name) / "model.safetensors")))
    tensors = {canonical: stored[t.name] for canonical, t in head.tensors.items()}
    family = made_family(stage_of(checkpoint(name), LAYERS), "post_norm")
    _ = fill_head(family, HeadSource(tensors, None))
    del tensors[tensor]
    with pytest.raises(HeadUnusable, match=f"lacks {lacks or tensor}"):
        _ = fill_head(family, HeadSource(tensors, None))


def test_tensors_of_longcats_head_that_do_not_fit_together_are_refused() -> None:
    family = made_family(stage_of(checkpoint("longcat_flash"), LAYERS), "post_norm")
    source = HeadSource({"self_attn.kv_b_proj.weight": mx.zeros((15, 8))}, None)
    with pytest.raises(HeadUnusable, match="do not fit together"):
        _ = load_head(family, source, mx.float32)


def test_a_further_layer_of_mimos_head_is_refused(tmp_path: Path) -> None:
    """Heads with a layer for each depth are not implemented; half of one is not used."""
    stored = cast("dict[str, mx.array]", mx.load(str(checkpoint("mimo") / "model.safetensors")))
    further = {
        name.replace("mtp_layers.0", "mtp_layers.1"): value
        for name, value in stored.items()
        if "mtp_layers" in name
    }
    mx.save_safetensors(str(tmp_path / "model.safetensors"), stored | further, {"format": "pt"})
    config: dict[str, Any] = json.loads((checkpoint("mimo") / "config.json").read_text())
    _ = (tmp_path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 2}))
    missing = find_head(read_checkpoint(tmp_path))
    assert isinstance(missing, HeadMissing)
    assert "only heads of one" in missing.reason
    _ = (tmp_path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    _ = shutil.copy(checkpoint("mimo", fitted=True) / "tokenizer.json", tmp_path)
    state = load_quietly(spec(tmp_path, 0, LAYERS, num_layers=LAYERS, native_mtp=True)).head_state
    assert "that config.json does not predict, the first model.mtp_layers.1." in state
