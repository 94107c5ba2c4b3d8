"""Costs of a block drafter's rounds at the shapes of large models, beside a head and without one.

    python bench/block_drafters.py 27B:4 [--drafters dflash2 dflash] [--prompt 512] [--tokens 48]
        [--repeats 15] [--k 7] [--layers 0.05]
    python bench/block_drafters.py tiny:4 --prompt 60

Target, head and drafters have random weights; see `load_shape` of bench/shape_engine.py. A drafter
has the sizes of the published one for the 27B, fitted to the shape. Milliseconds of one request:
`verify_ms` of a forward of K + 1 rows, `draft_ms` of K drafts, each waited for, and `round_ms` of
rounds in an answer, in which they may overlap and rejected rows are taken back. `tokens_to_pay`:
that round in plain steps, so the tokens that it must give. `acceptance_to_pay`: the share of drafts
of which each must be accepted after accepted ones; null where such rounds cannot pay.

Each drafter alone, then beside the head, answers with every K as its random weights draft; at last
its drafts are exchanged for the plain answer, but for each third token. It ends with status 1 if an
answer's ids are not those without drafts although the engine's probes found all equal.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from exo_node.shard.model import loader_import  # before MLX, so that products of our own may be

# isort: split
import mlx.core as mx
from drafters import drafter_config, force, second_config, stock_module
from engines import Answer, answer, request
from mlx import nn
from shape_engine import load_shape
from shapes import SHAPES

from exo_node.mtp.families.table import family_of
from exo_node.mtp.pieces import result_of
from exo_node.mtp.probe import measure_costs
from exo_node.mtp.types import DrafterKind
from exo_node.shard.engine.answers.text_engine import TextEngine
from exo_node.shard.engine.drafter import new_draft
from exo_node.shard.engine.options import EngineOptions
from exo_node.shard.model.block_drafter import BlockDrafter
from exo_node.shard.model.draft_pair import DraftPair, Head
from exo_node.shard.model.load import Loaded
from exo_node.shard.model.open_model import parameters_of

LOADER = loader_import.__name__
_LAYERS: Final = 5
_WINDOW: Final = 2048
LAYOUTS: Final = {"dflash": (drafter_config, 16, 1), "dflash2": (second_config, 8, 5)}
"""By layout: the config, the published block size, and the first layer of the 27B that it reads,
the fourth from the end being the last."""
_SECOND: Final = {"conv_kernel_size": 2, "conv_group_size": 16}
_SELECTOR: Final = {"selector_rank": 256, "selector_top_k": 16}


def main() -> int:
    options = _options()
    rows = options.prompt + options.tokens + 64
    engine_options = EngineOptions("bfloat16", rows, max_draft_tokens=options.k, batching=False)
    loaded = load_shape(options.shape, engine_options, options.layers)
    bench = DrafterBench(loaded, engine_options, options)
    print(json.dumps({"device": str(mx.default_device()), **bench.target}), flush=True)
    for layout in options.drafters:
        for result in bench.measure(layout):
            print(json.dumps(result), flush=True)
    return 1 if bench.is_different else 0


class DrafterBench:
    """A target with its head, and the block drafters beside them, one at a time."""

    def __init__(self, loaded: Loaded, options: EngineOptions, asked: argparse.Namespace) -> None:
        self._loaded, self._options, self._asked = loaded, options, asked
        self._prompt = [(31 * i + 7) % 4000 for i in range(asked.prompt)]
        self._plain_ms = 0.0
        self.is_different = False
        """Whether an answer has other ids than without drafts where all should be equal."""

    @property
    def target(self) -> dict[str, Any]:
        """Gigabytes of the target and of its head."""
        model, head = self._loaded.model.model, self._loaded.head
        return {"shape": self._asked.shape, "target_GB": _gb(model), "head_GB": _gb(head)}

    def measure(self, layout: str) -> Iterator[dict[str, Any]]:
        """Yields the costs of the drafter alone, of it beside the head, and of the head there."""
        drafter = self._drafter(layout)
        stage, head = self._loaded.model, self._loaded.head
        family = family_of(stage.model, head.hidden_kind)
        assert family is not None, "a shape has a family"
        for name, each in (("alone", drafter), ("pair", DraftPair(family, head, drafter))):
            engine = self._engine(each)
            plain = self._answer(engine, 0)
            self._plain_ms = _round_ms(plain)
            for kind in engine.drafting.models:
                engine.drafting.comparison.kind = kind
                yield {
                    "drafter": f"{layout} {name}",
                    "drafts": kind,
                    "drafter_GB": _gb(drafter.module),
                    "peak_GB": round(mx.get_peak_memory() / 1e9, 2),
                    "identity": engine.measurements.identity,
                    "most_exact_drafts": engine.drafting.depth,
                    "plain_ms": round(self._plain_ms, 2),
                    **self._costs(engine, kind, plain),
                }
        _ = drafter.module.pop("candidate_selector", None)  # it would rank other ids
        force(drafter, [[*self._prompt, *plain.ids]], lambda i: i % 3 == 0)
        engine = self._engine(DraftPair(family, head, drafter))
        yield {"drafter": f"{layout} pair", "forced": self._answers(engine, plain)}

    def _engine(self, head: Head) -> TextEngine:
        engine = TextEngine(replace(self._loaded, head=head), self._options)
        engine.measurements.measure()
        return engine

    def _costs(self, engine: TextEngine, kind: DrafterKind, plain: Answer) -> dict[str, Any]:
        subject, depths = engine.measurements.subject, range(1, engine.drafting.depth + 1)
        drafted = replace(subject, make_drafter=partial(new_draft, engine.drafting.models[kind]))
        costs = result_of(measure_costs(drafted, self._prompt, depths, self._asked.repeats))
        by_k = dict[str, Any]()
        for k, answered in self._answers(engine, plain).items():
            steps = answered["round_ms"] / self._plain_ms
            by_k[k] = {
                "verify_ms": round(1e3 * costs.verify[int(k)], 2),
                "draft_ms": round(1e3 * costs.draft[int(k) - 1], 2),
                **answered,
                "tokens_to_pay": round(steps, 2),
                "acceptance_to_pay": acceptance_to_pay(steps, int(k)),
            }
        return {"step_ms": round(1e3 * costs.verify[0], 2), "by_k": by_k}

    def _answers(self, engine: TextEngine, plain: Answer) -> dict[str, Any]:
        """Answers with each K, of which a warm-up comes before."""
        by_k = dict[str, Any]()
        for k in range(1, engine.drafting.depth + 1):
            answers = [self._answer(engine, k) for _ in range(2)]
            same_ids = all(each.ids == plain.ids for each in answers)
            if not same_ids and engine.measurements.identity == "bitwise":
                self.is_different = True
            stats = answers[1].stats
            by_k[str(k)] = {
                "round_ms": round(_round_ms(answers[1]), 2),
                "accepted": round(stats.accepted_draft_tokens / stats.proposed_draft_tokens, 2),
                "same_ids": same_ids,
            }
        return by_k

    def _answer(self, engine: TextEngine, k: int) -> Answer:
        return answer(engine, request(self._prompt, k, self._asked.tokens, ignore_eos=True))

    def _drafter(self, layout: str) -> BlockDrafter:
        shape, stage = SHAPES[self._asked.shape.partition(":")[0]], self._loaded.model
        config = published_config(layout, shape)
        mx.random.seed(5)
        module = stock_module(config)
        module.set_dtype(mx.bfloat16)
        module.eval()
        for layer in module.layers:
            mx.eval(layer.parameters())  # its float32 numbers are gone before the next ones
        mx.eval(module.parameters())
        return BlockDrafter(module, stage.model, stage.own_layers, layout)


def published_config(layout: str, shape: dict[str, Any]) -> dict[str, Any]:
    """config.json of the published drafter for the 27B (DFlash, and DFlash 2 of Qwen3.8), with
    the target's sizes."""
    make, block, first = LAYOUTS[layout]
    layers, hidden, vocabulary = (
        shape[name] for name in ("num_hidden_layers", "hidden_size", "vocab_size")
    )
    first, last, heads = first * layers // 64, layers - 3, -(-32 * hidden // 5120)
    read = [first + round(i * (last - first) / (_LAYERS - 1)) for i in range(_LAYERS)]
    config = make(
        vocabulary,
        hidden=hidden,
        layers=layers,
        intermediate_size=shape["intermediate_size"],
        num_hidden_layers=_LAYERS,
        num_attention_heads=heads,
        num_key_value_heads=-(-heads // 4),
        head_dim=128,
        max_position_embeddings=262144,
        rope_theta=1e7,
        block_size=block,
    )
    config["dflash_config"] |= {"target_layer_ids": read, "mask_token_id": vocabulary - 250}
    if layout == "dflash2":
        config |= {"layer_types": ["sliding_attention"] * _LAYERS, "sliding_window": _WINDOW}
        config["dflash_config"] |= {**_SECOND, **_SELECTOR}
    return config


def acceptance_to_pay(steps: float, k: int) -> float | None:
    """The share p of drafts accepted after accepted ones by which a round of K drafts gives `steps`
    tokens, 1 + p + ... + p^K; None where all drafts are too few."""
    if steps > k + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(30):
        p = (low + high) / 2
        low, high = (p, high) if sum(p**i for i in range(k + 1)) < steps else (low, p)
    return round(high, 3)


def _round_ms(got: Answer) -> float:
    """Milliseconds of a round in the mean, after the first token."""
    tokens = len(got.ids) - len(got.rounds[0].tokens)
    return 1e3 * tokens / got.stats.generation_tps / (len(got.rounds) - 1)


def _gb(module: nn.Module) -> float:
    return round(sum(array.nbytes for array in parameters_of(module)) / 1e9, 3)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    _ = add("shape", help="NAME:BITS of bench/shapes.py")
    _ = add("--drafters", nargs="+", choices=LAYOUTS, default=("dflash2", "dflash"))
    _ = add("--prompt", type=int, default=512, help="ids of the prompt")
    _ = add("--tokens", type=int, default=48, help="of each answer")
    _ = add("--repeats", type=int, default=15, help="of each verify and draft")
    _ = add("--k", type=int, default=7, help="the most drafts of a round")
    _ = add("--layers", type=float, default=0.05, help="how much the target's layers count")
    return parser.parse_args()


if __name__ == "__main__":
    status = main()
    _ = sys.stdout.flush()
    os._exit(status)  # without waiting for MLX's threads, as a runner
