"""Plain and drafted speed of a loaded model, and its time to the first token.

`exo-node bench mtp` uses the timed answers, too.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Final, Self

from ....mtp.types import GenerationStats, Sampling
from ....placement.errors import LoadFailed
from ....proto import peer_pb2 as pb
from ...engine.answers.events import AnswerEnd, Delta
from ...engine.answers.text_engine import TextEngine
from ...engine.options import EngineOptions
from ...engine.request import Parameters
from ...model.load import Loaded
from .result import SharedSpeed, Spread

REPEATS: Final = 3
ANSWER_TOKENS: Final = 128
PROMPT_TOKENS: Final = 512
"""Length of the prompt whose first token is timed."""
WARM_UP_TOKENS: Final = 16
PLAIN: Final = "it measures answers without drafts"

Note = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class TimedAnswer:
    """One answer with its times in seconds; `stats` None: another engine's."""

    ids: tuple[int, ...]
    ttft_s: float
    decode_s: float
    finish: str
    stats: GenerationStats | None

    @classmethod
    def of(
        cls,
        ids: Sequence[int],
        times: Sequence[float],
        finish: str,
        stats: GenerationStats | None = None,
    ) -> Self:
        """`times`: of the request and of each event."""
        first = times[min(1, len(times) - 1)]
        return cls(tuple(ids), first - times[0], times[-1] - first, finish, stats)


def measured_engine(loaded: Loaded, spec: pb.StageSpec) -> TextEngine:
    """The engine of a loaded model, warmed up and probed like a runner's."""
    # Without a prefix cache each repeat reads its prompt.
    engine = TextEngine(loaded, replace(EngineOptions.of(spec), prefix_cache_bytes=0))
    engine.measurements.measure()
    return engine


def timed_answer(
    engine: TextEngine,
    prompt: Sequence[int],
    max_tokens: int,
    drafting: pb.Drafting,
    temperature: float = 0.0,
) -> TimedAnswer:
    """Runs one answer. Raises LoadFailed if the engine ends it without its last event."""
    parameters = Parameters(
        name="bench",
        attempt=1,
        prompt=prompt,
        sampling=Sampling(temperature=temperature),
        limits=pb.Limits(max_tokens=max_tokens),
        drafting=drafting,
    )
    times, ids = [time.perf_counter()], list[int]()
    for event in engine.generate(parameters):
        if isinstance(event, Delta):
            times.append(time.perf_counter())
            ids += event.round.tokens
        elif isinstance(event, AnswerEnd):
            return TimedAnswer.of(ids, times, event.reason, event.stats)
    raise LoadFailed("the engine ended an answer without its last event")


def measure_speeds(
    engine: TextEngine,
    prompts: Sequence[Sequence[int]],
    initial_k: int,
    until_s: float,
    note: Note,
) -> SharedSpeed:
    """Answers every prompt plainly and with adaptive drafts, in turns.

    `initial_k`: drafts a round that adaptive K begins with. After the first repeat none begins
    later than `until_s`, a time of `time.perf_counter`. Raises LoadFailed for a model whose answers
    have one token.
    """
    k = engine.drafting.depth
    plain = pb.Drafting(num_draft_tokens=0, drafting_reason=PLAIN)
    drafted = pb.Drafting(num_draft_tokens=k, adaptive_draft=True, initial_draft_tokens=initial_k)
    arms = [plain, drafted] if k else [plain]
    long = [(11 * i + 5) % engine.measurements.subject.vocabulary for i in range(PROMPT_TOKENS)]
    long = long[: engine.limits.context_length // 2]
    for arm in arms:
        _ = timed_answer(engine, prompts[0], WARM_UP_TOKENS, arm)
    first_token, runs = list[float](), [list[list[TimedAnswer]]() for _ in arms]
    for repeat in range(REPEATS):
        if repeat and time.perf_counter() > until_s:
            break
        note(f"measuring speed, {repeat + 1} of {REPEATS}")
        first_token.append(timed_answer(engine, long, 1, plain).ttft_s)
        of_arm = [list[TimedAnswer]() for _ in arms]
        for number, prompt in enumerate(prompts):
            order = range(len(arms)) if (repeat + number) % 2 else reversed(range(len(arms)))
            for arm in order:  # another one begins each time
                of_arm[arm].append(timed_answer(engine, prompt, ANSWER_TOKENS, arms[arm]))
        for answers, all_answers in zip(of_arm, runs, strict=True):
            all_answers.append(answers)
    return _speed_of(runs, first_token, len(long))


def _speed_of(
    runs: Sequence[Sequence[Sequence[TimedAnswer]]], first_token: Sequence[float], prompt: int
) -> SharedSpeed:
    """`runs`: for each arm and repeat the answers; the plain arm is the first."""
    plain, *drafted = ([rate(answers) for answers in repeats] for repeats in runs)
    ratios = [b / a for a, b in zip(plain, drafted[0], strict=True)] if drafted else []
    answers = chain.from_iterable(runs[-1]) if drafted else ()
    stats = [each.stats for each in answers if each.stats]
    proposed = sum(each.proposed_draft_tokens for each in stats)
    accepted = sum(each.accepted_draft_tokens for each in stats)
    return SharedSpeed(
        plain_tok_s=Spread.of(plain),
        drafted_tok_s=Spread.of(drafted[0]) if drafted else None,
        ratio=Spread.of(ratios) if ratios else None,
        accepted_share=round(accepted / proposed, 3) if proposed else None,
        first_token_s=Spread.of(first_token),
        prompt_tokens=prompt,
        repeats=len(first_token),
    )


def rate(answers: Sequence[TimedAnswer]) -> float:
    """The tokens after the first ones, a second. Raises LoadFailed if there are none."""
    tokens, seconds = (
        sum(len(each.ids) - 1 for each in answers),
        sum(each.decode_s for each in answers),
    )
    if tokens <= 0 or seconds <= 0:
        raise LoadFailed(
            "the model ends its answers at once, so it has no speed; `exo-node chat` shows what it "
            "says"
        )
    return tokens / seconds
