"""Adaptive depth without a card against every fixed K, on the demo model in one run.

    python bench/depth.py [--repeats 9] [--tokens 192] [--profiles 0.9/0.8/0.7,head]

A profile is the share of drafts that is accepted at each position after accepted ones, the last
share at all further positions. It is forced: the head drafts as usual, so that a round costs what
it costs, and then the tokens of its drafts are exchanged for the plain answer's or for others.
`head` forces nothing. Adaptive drafting begins with one draft and may reach seven, as a head that
is found without a card does; its measurements are forgotten before each profile, and it reports its
first answer, in which it learns, apart. Ratios are taken within a repeat. `--clock cpu` counts CPU
time, for a machine that others use. It ends with status 1 if an arm's ids differ.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from exo_node.shard.model import loader_import  # before MLX, so that products of our own may be

# isort: split
import mlx.core as mx
from engines import engine_of, load_quietly, spec

from exo_node.mtp.batch_verdict import RowDrafts
from exo_node.mtp.drafting.acceptance import Prior
from exo_node.mtp.drafting.costs import CostTable
from exo_node.mtp.sampler import Sampler
from exo_node.mtp.types import GenerationStats, Sampling
from exo_node.proto import peer_pb2 as pb
from exo_node.shard.engine import batch
from exo_node.shard.engine.answers.events import AnswerEnd, Delta
from exo_node.shard.engine.drafter import Drafter
from exo_node.shard.engine.request import Parameters

LOADER = loader_import.__name__
PROMPTS = ("Tell me a story.", "Who are you?", "What does ocean mean?")
MAX_K = 7
ADAPTIVE = "adaptive"
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
PROFILES = ("0.9/0.8/0.7", "0.75/0.5/0.3", "0.5/0.2/0.1", "head")


class ForcedDrafter(Drafter):
    """Drafts as the head does, then exchanges the tokens so that `acceptance` holds."""

    acceptance: Sequence[float] = ()
    """Shares by position; empty: nothing is exchanged."""
    text: Sequence[int] = ()
    """Prompt and plain answer."""
    draw = random.Random(0)

    def draft(
        self,
        k: int,
        limits: Sequence[int],
        samplers: Sequence[Sampler],
        positions: Sequence[int],
        last: mx.array | None = None,
    ) -> RowDrafts:
        drafts = super().draft(k, limits, samplers, positions, last)
        kind = type(self)
        if not kind.acceptance:
            return drafts
        mx.async_eval(drafts.tokens)  # else the head would not be computed at all
        following = [*kind.text[positions[0] : positions[0] + k], *[0] * k][:k]
        ids = [
            token if kind.draw.random() < p else token ^ 1
            for token, p in zip(following, kind.acceptance, strict=False)
        ]
        forced = mx.array([ids], dtype=mx.int32) + 0 * drafts.tokens
        return RowDrafts(forced, drafts.finite, drafts.drawn)


class Bench:
    """The demo's engine, its prompts and their plain answers."""

    def __init__(self, tokens: int, clock: Callable[[], float]) -> None:
        self._tokens = tokens
        stage_spec = spec(native_mtp=True, max_draft_tokens=MAX_K)
        self.engine = engine_of(load_quietly(stage_spec), stage_spec, clock=clock)
        self.engine.measurements.measure()
        self._profile: Any = self.engine.measurements.profile  # pyright: ignore[reportPrivateUsage]
        self._probed = self._profile.costs.probed
        self._prompts = [
            self.engine.codec.encode_chat([{"role": "user", "content": text}]) for text in PROMPTS
        ]
        self._answers = list[list[int]]()
        for prompt in range(len(PROMPTS)):
            self._answers.append(self._ids(prompt, 0, adaptive=False)[0])

    def forget(self) -> None:
        """The profile as it is right after a model's first load."""
        self._profile.prior = Prior()
        policy: Any = self.engine.lookup.policy
        self._profile.costs = CostTable(self._probed)
        policy.__init__(self._profile.costs)

    def run(self, prompt: int, arm: str) -> tuple[int, float, GenerationStats]:
        """Tokens after the first, their seconds and the stats of one answer."""
        ForcedDrafter.text = [*self._prompts[prompt], *self._answers[prompt]]
        adaptive = arm == ADAPTIVE
        k = MAX_K if adaptive else int(arm.removeprefix("K="))
        ids, stats = self._ids(prompt, k, adaptive=adaptive)
        if ids != self._answers[prompt]:
            raise SystemExit(f"{arm}: prompt {prompt} has other ids than without drafts")
        return len(ids) - 1, (len(ids) - 1) / stats.generation_tps, stats

    def _ids(self, prompt: int, k: int, *, adaptive: bool) -> tuple[list[int], GenerationStats]:
        request = Parameters(
            "bench",
            1,
            self._prompts[prompt],
            Sampling(),
            pb.Limits(max_tokens=self._tokens, ignore_eos=True),
            pb.Drafting(
                num_draft_tokens=k,
                drafting_reason="" if k else "asked",
                adaptive_draft=adaptive,
                initial_draft_tokens=1 if adaptive else k,
            ),
            sharing=pb.Sharing(cache=False),
        )
        ids, stats = list[int](), None
        for event in self.engine.generate(request):
            if isinstance(event, Delta):
                ids += event.round.tokens
            elif isinstance(event, AnswerEnd):
                stats = event.stats
        assert stats is not None
        return ids, stats


def main() -> None:
    options = _options()
    batch.Drafter = ForcedDrafter  # pyright: ignore[reportPrivateLocalImportUsage]
    bench = Bench(options.tokens, CLOCKS[options.clock])
    probed = bench.engine.measurements.profile.costs.probed  # pyright: ignore[reportPrivateUsage]
    plain = [round(seconds / probed[0], 2) for seconds in probed]
    print(f"{mx.default_device()}; rounds of K = 0 to {MAX_K} as probed, in plain steps: {plain}")
    for profile in options.profiles.split(","):
        print(json.dumps(_measure(bench, profile, options.repeats)), flush=True)


def _measure(bench: Bench, profile: str, repeats: int) -> dict[str, Any]:
    shares = [] if profile == "head" else [float(p) for p in profile.split("/")]
    ForcedDrafter.acceptance = [*shares, *shares[-1:] * MAX_K][:MAX_K]
    ForcedDrafter.draw.seed(profile)
    arms = [*(f"K={k}" for k in range(MAX_K + 1)), ADAPTIVE]
    bench.forget()
    count, seconds, _ = bench.run(0, ADAPTIVE)
    first = count / seconds
    rates: dict[str, list[float]] = {arm: [] for arm in arms}
    depths, reason = [0] * (MAX_K + 1), ""
    for repeat in range(repeats):
        totals = {arm: [0, 0.0] for arm in arms}
        for prompt in range(len(PROMPTS)):
            turn = (repeat + prompt) % len(arms)
            for arm in arms[turn:] + arms[:turn]:
                count, seconds, stats = bench.run(prompt, arm)
                totals[arm][0] += count
                totals[arm][1] += seconds
                if arm == ADAPTIVE:
                    reason = stats.depth_reason
                    for k, rounds in enumerate(stats.draft_k_histogram):
                        depths[k] += rounds
        for arm, (tokens, took) in totals.items():
            rates[arm].append(tokens / took)
    medians = {arm: statistics.median(values) for arm, values in rates.items()}
    best = max(arms[:-1], key=medians.__getitem__)
    ratios = [a / b for a, b in zip(rates[ADAPTIVE], rates[best], strict=True)]
    return {
        "profile": profile,
        "tokens_s": {arm: round(rate, 1) for arm, rate in medians.items()},
        "best": best,
        "adaptive_of_best": round(statistics.median(ratios), 3),
        "spread": [round(min(ratios), 3), round(max(ratios), 3)],
        "adaptive_of_K=1": round(medians[ADAPTIVE] / medians["K=1"], 3),
        "first_answer_of_best": round(first / medians[best], 3),
        "rounds_by_k": depths,
        "reason": reason,
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    _ = parser.add_argument("--repeats", type=int, default=9)
    _ = parser.add_argument("--tokens", type=int, default=192, help="of each answer")
    _ = parser.add_argument("--profiles", default=",".join(PROFILES))
    _ = parser.add_argument("--clock", choices=CLOCKS, default="wall")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
