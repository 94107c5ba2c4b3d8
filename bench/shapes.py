"""Measures a round of native MTP at the shapes of large models, with random weights.

    python bench/shapes.py 27B:4 35B-A3B:4 27B:16 [--repeats 30] [--prompt 2048]
        [--variants plain ahead=1 vocabulary=32768 head=4 vocabulary=32768,head=4]
        [--kernels mlx]

Variants of the same weights: `vocabulary` drafts from that many first ids, `head` quantises the
draft head, `ahead` builds each round while the one before it runs.

Ids are meaningless and acceptance is forced, so that a round with every draft accepted and one
with none (which also replays the recurrent layers) are timed apart. Costs are in plain steps of the
same run, so that machines can be compared; tokens a second follow from published acceptance.
"""

import argparse
import itertools
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any, cast

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3_5

from exo_node.mtp.accept import VerifyResult
from exo_node.mtp.caches.rollback import with_tapes
from exo_node.mtp.families.family import draft_logits
from exo_node.mtp.families.qwen35 import Qwen35Family
from exo_node.mtp.families.table import prepare
from exo_node.mtp.sampler import Sampler
from exo_node.mtp.seams import Drafts
from exo_node.mtp.targets import FamilyTarget
from exo_node.mtp.types import Round, Sampling, Step
from exo_node.shard.engine.drafter import DraftModel
from exo_node.shard.kernels.install import used
from exo_node.shard.kernels.kernel_choice import Mode, choose_kernels
from exo_node.shard.kernels.trial import KernelChoice
from exo_node.shard.tools.bare_engine import bare_engine, bare_request

_HYBRID = {
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_conv_kernel_dim": 4,
    "head_dim": 256,
    "vocab_size": 248320,
    "full_attention_interval": 4,
    "max_position_embeddings": 262144,
}
# Widths of the published config.json files of Qwen3.5/3.6; the weights here are random.
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": _HYBRID
    | {
        "hidden_size": 256,
        "num_hidden_layers": 8,
        "intermediate_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "linear_num_value_heads": 16,
        "vocab_size": 4096,
    },
    "27B": _HYBRID
    | {
        "hidden_size": 5120,
        "num_hidden_layers": 64,
        "intermediate_size": 17408,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "linear_num_value_heads": 48,
    },
    "35B-A3B": _HYBRID
    | {
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "intermediate_size": 5632,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "linear_num_value_heads": 32,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
}
# exo pull request 2110, Qwen3.6 oQ8 on an M5 Max: share of proposed drafts that was accepted.
PUBLISHED = {"27B": (0.857, 0.754, 0.664), "35B-A3B": (0.558, 0.383, 0.274)}


class _Forced(Sampler):
    """Accepts all drafts or none whatever the target's logits; the device work stays the same."""

    def __init__(self, accept: bool) -> None:
        super().__init__(Sampling(), entropy=1)
        self._accept = accept

    @property
    def is_argmax(self) -> bool:
        return False  # its verdict is its own

    def judge(self, logits: mx.array, drafts: Drafts | None, position: int) -> VerifyResult:
        verdict = super().judge(logits, drafts, position)
        if drafts is None:
            return verdict
        k = drafts.tokens.shape[0] if self._accept else 0
        # Reading `accepted` must still wait for the verify: it is one synchronisation of the round.
        return VerifyResult(verdict.accepted * 0 + k, verdict.tokens)


@dataclass(frozen=True, slots=True)
class ShapeVariant:
    """A way to run one model; 0 turns an option off."""

    vocabulary: int = 0
    head: int = 0
    ahead: int = 0

    @classmethod
    def parse(cls, text: str) -> "ShapeVariant":
        if text == "plain":
            return cls()
        return cls(**{key: int(value) for key, value in (p.split("=") for p in text.split(","))})


def main() -> None:
    parser = argparse.ArgumentParser(description="Round costs at the shapes of large models")
    _ = parser.add_argument("shapes", nargs="+", help="NAME:BITS, 16 for bfloat16")
    _ = parser.add_argument("--repeats", type=int, default=30)
    _ = parser.add_argument("--prompt", type=int, default=2048)
    _ = parser.add_argument(
        "--variants", nargs="+", type=ShapeVariant.parse, default=[ShapeVariant()]
    )
    _ = parser.add_argument("--kernels", choices=("auto", "mlx"), default="auto")
    options = parser.parse_args()
    info = mx.device_info()
    device = info.get("device_name") or info.get("architecture")
    print(f"{mx.default_device()}, {device}, mlx {version('mlx')}, {platform.platform()}")
    for spec in options.shapes:
        name, _, bits = spec.partition(":")
        subject = ShapeModel(name, int(bits or 16), options.repeats, options.prompt)
        for chosen in subject.choose(options.kernels):
            print(chosen, flush=True)
        for variant in options.variants:
            print(json.dumps(subject.measure(variant)), flush=True)
        del subject
        mx.clear_cache()


class ShapeModel:
    """One model of random weights, measured in several variants."""

    def __init__(self, name: str, bits: int, repeats: int, prompt: int) -> None:
        self._name, self._bits, self._repeats = name, bits, repeats
        self.model, self._family, self.head = _build(name, bits)
        self.target = FamilyTarget(self._family)
        self._ids = [(31 * i + 7) % 4000 for i in range(prompt)]
        self._kernels: tuple[str, ...] = ()
        self._first_plain, self._plain = 0.0, 0.0

    def choose(self, mode: Mode) -> tuple[KernelChoice, ...]:
        """Installs kernels like a load, then measures plain decoding."""
        parts: list[nn.Module] = [*self.model.layers, self._family.output, self.head]
        chosen = choose_kernels(parts, mode, time.perf_counter, print)
        self._kernels = used(chosen)
        self._run(
            ShapeVariant(), self.head, 0, True
        )  # MLX's kernels are compiled at their first use
        self._first_plain, self._plain = self._run(ShapeVariant(), self.head, 0, True)
        return chosen

    def measure(self, variant: ShapeVariant, depth: int = 3) -> dict[str, Any]:
        """Costs of rounds of 1 to `depth` drafts, in plain steps of the unpadded model, which are
        the reference of speed-ups as well."""
        head = self._head_of(variant)
        self._run(variant, head, 1, True)
        first, step = self._run(variant, head, 0, True)
        weights = sum(cast(mx.array, p).nbytes for _, p in tree_flatten(self.model.parameters()))
        result: dict[str, Any] = {
            "shape": self._name,
            "bits": self._bits,
            "variant": asdict(variant),
            "kernels": list(self._kernels),
            "weights_GB": round(weights / 1e9, 2),
            "prompt": len(self._ids),
            "plain_ms": round(self._plain * 1e3, 2),
            "plain_tok_s": round(1 / self._plain, 1),
            "step_ms": round(step * 1e3, 2),
            "ttft_off_s": round(self._first_plain, 3),
            "ttft_s": round(first, 3),
        }
        for k in range(1, depth + 1):
            result[f"K={k}"] = self._round(variant, head, k)
        return result

    def _round(self, variant: ShapeVariant, head: Any, k: int) -> dict[str, Any]:
        plain = self._plain
        first, full = self._run(variant, head, k, True)
        _, none = self._run(variant, head, k, False)
        row: dict[str, Any] = {
            "accepted_all_steps": round(full / plain, 3),
            "accepted_none_steps": round(none / plain, 3),
            "ttft_s": round(first, 3),
        }
        if k <= len(shares := PUBLISHED.get(self._name, ())):
            share = shares[k - 1]
            tokens = 1 + share * k
            cost = share * full + (1 - share) * none
            row["published_tokens_per_round"] = round(tokens, 3)
            row["implied_speedup"] = round(tokens * plain / cost, 3)
        return row

    def _run(self, variant: ShapeVariant, head: Any, k: int, accept: bool) -> tuple[float, float]:
        """(seconds to the first token, median seconds a round)."""
        logits = draft_logits(self._family, head, variant.vocabulary)
        engine = bare_engine(
            self.target,
            lambda: with_tapes(self.model.make_cache()),
            DraftModel(head, self._family.embed, logits),
            runs_ahead=bool(variant.ahead) or not k,
        )
        times: list[float] = []

        def deliver(step: Step) -> None:
            if isinstance(step, Round):
                times.append(time.perf_counter())

        request = bare_request(
            self._ids, 10_000, 512, k, sampler=_Forced(accept) if k else None, deliver=deliver
        )
        start = time.perf_counter()
        engine.add(request)
        while len(times) <= self._repeats + 5 and engine.step():
            pass
        engine.cancel(request)
        while engine.step():
            pass
        gaps = [b - a for a, b in itertools.pairwise(times[5:])]
        return times[0] - start, statistics.median(gaps)

    def _head_of(self, variant: ShapeVariant) -> Any:
        if not variant.head:
            return self.head
        head = self._family.make_head()
        head.update(self.head.parameters())
        nn.quantize(head, group_size=64, bits=variant.head)
        mx.eval(head.parameters())
        return head


def _build(name: str, bits: int) -> tuple[qwen3_5.Model, Qwen35Family, Any]:
    text = {"model_type": "qwen3_5", "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
    config = {"model_type": "qwen3_5", "text_config": text | SHAPES[name]}
    model = qwen3_5.Model(qwen3_5.ModelArgs.from_dict(config))
    model.set_dtype(mx.bfloat16)
    if bits < 16:
        _quantize(model, bits)
    model.eval()
    _evaluate_by_layer(model)
    prepare(model)
    family = Qwen35Family(model)
    head = family.make_head()
    head.set_dtype(mx.bfloat16)
    mx.eval(head.parameters())
    return model, family, head


def _quantize(model: qwen3_5.Model, bits: int) -> None:
    text = model.language_model
    chosen = cast("Callable[[str, nn.Module], Any] | None", text.quant_predicate)

    def predicate(path: str, module: nn.Module) -> Any:
        if not hasattr(module, "to_quantized"):
            return False
        return chosen(path, module) if chosen else True

    nn.quantize(text, group_size=64, bits=bits, class_predicate=predicate)


def _evaluate_by_layer(model: qwen3_5.Model) -> None:
    """Evaluates layer by layer: all unquantised weights would not fit into memory."""
    for layer in model.layers:
        mx.eval(layer.parameters())
    mx.eval(model.parameters())


if __name__ == "__main__":
    main()
