"""Runs the arms of a benchmark on the loaded model, in turns, and times their answers."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import mlx.core as mx
from mlx_lm.generate import stream_generate
from mlx_lm.sample_utils import make_sampler
from mlx_lm.tokenizer_utils import load as load_tokenizer
from mlx_lm.utils import load_config, load_model

from exo_node.placement.errors import LoadFailed
from exo_node.proto import peer_pb2 as pb
from exo_node.shard.engine.answers.text_engine import TextEngine
from exo_node.shard.model.load import Loaded, load
from exo_node.shard.model.tensors import DTYPES
from exo_node.shard.tools.share.speeds import (
    TimedAnswer,
    measured_engine,
    timed_answer,
)

from ..spread import rotated
from .report import ADAPTIVE, BOTH, LOOKUP, MLX_LM, OFF, Arm, StepCosts, TimedRun
from .request import BenchRequest

WARM_UP_TOKENS = 32
COST_REPEATS = 10

Progress = Callable[[int, int, str], None]
"""Called with the number of complete answers, of all answers, and the name of the current run."""


Answer = Callable[[Sequence[int], int], TimedAnswer]
"""Answers a prompt: ids, the most tokens -> the answer."""


def open_model(spec: pb.StageSpec) -> tuple[Loaded, TextEngine]:
    """The model and its engine, warmed up and probed like a runner's. Raises InvalidCheckpoint."""
    loaded = load(spec, lambda _: None)
    return loaded, measured_engine(loaded, spec)


def make_arms(request: BenchRequest, max_k: int, *, copies: bool) -> tuple[Arm, ...]:
    """The arms of a request. `max_k`: drafts at most, 0 if the head drafts nothing. `copies`:
    whether lookup may."""
    arms = [Arm(MLX_LM, "mlx-lm", 0)] if request.against_mlx_lm else []
    arms.append(Arm(OFF, "off", 0))
    if max_k:
        arms += [Arm(f"K={k}", "fixed", k) for k in request.depths if k <= max_k]
        if request.adaptive:
            arms.append(Arm(ADAPTIVE, "adaptive", max_k))
    if request.lookup and copies:
        arms.append(Arm(LOOKUP, "lookup", 0))
        if max_k:
            arms.append(Arm(BOTH, "both", max_k))
    return tuple(arms)


def make_answers(
    request: BenchRequest, spec: pb.StageSpec, arms: Sequence[Arm], engine: TextEngine
) -> dict[str, Answer]:
    """A function for each arm. Raises LoadFailed if mlx-lm cannot load the model by itself."""
    return {
        arm.name: _mlx_lm(request, spec) if arm.kind == "mlx-lm" else _ours(engine, arm, request)
        for arm in arms
    }


def sweep(
    answers: dict[str, Answer],
    prompts: Sequence[Sequence[int]],
    request: BenchRequest,
    progress: Progress,
) -> list[TimedRun]:
    """Runs every arm on every prompt, `repeats` times, after a warm-up.

    Arms take turns on each prompt, and another one begins each time, so that a machine whose speed
    drifts slows all of them alike.
    """
    ordered = sorted(prompts, key=len)
    for name, answer in answers.items():
        progress(0, 0, f"warming up {name}")
        for prompt in (ordered[0], ordered[-1]):
            _ = answer(prompt, min(WARM_UP_TOKENS, request.max_tokens))
    runs: list[TimedRun] = []
    total = request.repeats * len(prompts) * len(answers)
    for repeat in range(request.repeats):
        for number, prompt in enumerate(prompts):
            timed: dict[str, TimedAnswer] = {}
            for name in rotated(list(answers), repeat * len(prompts) + number):
                progress(len(runs) + len(timed), total, f"repeat {repeat + 1}, {name}")
                timed[name] = answers[name](prompt, request.max_tokens)
            off = timed[OFF] if request.temperature == 0 else None
            runs += [_run(repeat, name, number, timed[name], off) for name in answers]
    return runs


def measure_steps(engine: TextEngine, prompts: Sequence[Sequence[int]], max_k: int) -> StepCosts:
    """Costs of verifies and drafts by themselves, after the prompt of median length."""
    prompt = sorted(prompts, key=len)[len(prompts) // 2]
    costs = engine.measurements.costs(prompt, max_k, COST_REPEATS)
    plain = costs.verify[0]
    draft = (0.0, *costs.draft)
    return StepCosts(plain, tuple(v / plain for v in costs.verify), tuple(d / plain for d in draft))


def _run(
    repeat: int, arm: str, prompt: int, timed: TimedAnswer, off: TimedAnswer | None
) -> TimedRun:
    stats = timed.stats
    return TimedRun(
        repeat=repeat,
        arm=arm,
        prompt=prompt,
        tokens=len(timed.ids),
        ttft_s=timed.ttft_s,
        decode_s=timed.decode_s,
        finish=timed.finish,
        rounds=stats.spec_decode_rounds if stats else 0,
        proposed=stats.proposed_draft_tokens if stats else 0,
        accepted=stats.accepted_draft_tokens if stats else 0,
        accepted_per_position=stats.accepted_per_position if stats else (),
        draft_k_histogram=stats.draft_k_histogram if stats else (),
        same_ids=None if off is None else timed.ids == off.ids,
    )


def _ours(engine: TextEngine, arm: Arm, request: BenchRequest) -> Answer:
    drafting = pb.Drafting(
        num_draft_tokens=arm.k,
        drafting_reason="" if arm.k else "the benchmark's arm without drafts",
        adaptive_draft=arm.kind in ("adaptive", "both"),
        initial_draft_tokens=request.initial_k,
        prompt_lookup=arm.kind in ("lookup", "both"),
    )

    def answer(prompt: Sequence[int], max_tokens: int) -> TimedAnswer:
        return timed_answer(engine, prompt, max_tokens, drafting, request.temperature)

    return answer


def _mlx_lm(request: BenchRequest, spec: pb.StageSpec) -> Answer:
    """mlx-lm's own loop on its own copy: ours has recurrent layers that roll back."""
    folder = Path(spec.path)
    try:
        model, _ = load_model(folder, lazy=True)
    except ValueError as fault:
        raise LoadFailed(
            f"--against mlx-lm: mlx-lm cannot load this model by itself ({fault}); leave it out"
        ) from fault
    _ = model.set_dtype(DTYPES[spec.dtype])
    mx.eval(model.parameters())
    extra = {"trust_remote_code": False}
    tokenizer = load_tokenizer(folder, extra, load_config(folder).get("eos_token_id"))
    sampler = make_sampler(temp=request.temperature)

    def answer(prompt: Sequence[int], max_tokens: int) -> TimedAnswer:
        times, ids, finish = [time.perf_counter()], list[int](), ""
        stream = stream_generate(
            model, tokenizer, list(prompt), max_tokens=max_tokens, sampler=sampler
        )
        for part in stream:
            times.append(time.perf_counter())
            ids.append(int(part.token))
            finish = part.finish_reason or ""
        return TimedAnswer.of(ids, times, finish)

    return answer
