"""Trials: one answer, and processes that are killed or stopped during it.

A trial states which runner or node is hit, how and when. It is made from a seed and a number, so
that `bench/kills.py --seed S --only N` repeats it.
"""

import contextlib
import itertools
import random
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import psutil
from engines import ORACLE
from laboratory import Laboratory, Place
from listening import SILENCE_S, Answer, ask

Target = Literal["generator", "stage 1", "stage 2", "node"]
How = Literal["kill", "stop, continue", "stop, kill"]
Phase = Literal["prefill", "decode", "resume"]

TARGETS: Final[tuple[Target, ...]] = ("generator", "stage 1", "stage 2", "node")
HOWS: Final[tuple[How, ...]] = ("kill", "stop, continue", "stop, kill")
PHASES: Final[tuple[Phase, ...]] = ("prefill", "decode", "resume")

GAP_AFTER_KILL_S: Final = 3.0
GAP_AFTER_STOP_S: Final = 6.0
FREED_WITHIN_S: Final = 10.0
HUNG_S: Final = 30.0
NEVER_END: Final = {"logit_bias": {"4095": -100}}
"""Bans the demo model's end token, so that answers have `max_tokens` tokens."""


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt with the ids and times of its undisturbed answer."""

    name: str
    prompt: str
    fields: Mapping[str, Any]
    ids: tuple[int, ...] = ()
    first_s: float = 0.0
    gap_s: float = 0.0

    def answered_by(self, lab: Laboratory) -> "Question":
        """A copy with the ids and times of an undisturbed answer; fails the test if none ends."""
        answer = ask(lab.node(lab.head()), self.prompt, **self.fields)
        assert answer.ended(4 * SILENCE_S) and not answer.error, answer.error
        first, *rest = answer.gaps()
        assert self.ids in ((), tuple(answer.ids)), f"{self.name} is not the oracle's"
        ids = tuple(answer.ids)
        return Question(self.name, self.prompt, self.fields, ids, first, max(rest, default=0.0))


def oracle_question(prompt: str) -> Question:
    row = next(row for row in ORACLE if row["prompt"] == prompt)
    return Question(f"oracle: {prompt}", prompt, {}, tuple(row["greedy_ids"]))


def questions() -> list[Question]:
    """The oracle's answers of 20 tokens or more, long ones, and long prompts."""
    long = " ".join(str(row["prompt"]) for row in ORACLE)
    return [
        *(oracle_question(row["prompt"]) for row in ORACLE if len(row["greedy_ids"]) >= 20),
        *(
            Question(f"{n} tokens", "Tell me a story.", {"max_tokens": n, **NEVER_END})
            for n in (128, 256, 512)
        ),
        # Read in several chunks, over all stages.
        Question("long prompt", " ".join([long] * 9), {"max_tokens": 64, **NEVER_END}),
    ]


@dataclass(frozen=True, slots=True)
class Trial:
    """One blow during one answer; `chance` decides all that the fields leave open."""

    name: str
    target: Target
    how: How
    phase: Phase
    question: Question
    chance: random.Random = field(compare=False, repr=False)


def trials(seed: int, questions: Sequence[Question]) -> Iterator[Trial]:
    """Endless: every combination once in random order, then again in another order."""
    reading = [q for q in questions if q.name == "long prompt"]
    for turn in itertools.count():
        order = list(itertools.product(TARGETS, HOWS, PHASES))
        random.Random(f"{seed}/{turn}").shuffle(order)
        for number, (target, how, phase) in enumerate(order, start=turn * len(order)):
            chance = random.Random(f"{seed}/{turn}/{number}")
            question = chance.choice(reading if phase == "prefill" else questions)
            yield Trial(f"{seed}/{number}", target, how, phase, question, chance)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a trial, which passed if `faults` is empty."""

    trial: Trial
    faults: tuple[str, ...]
    hit: bool
    """Whether the answer was in progress when it was hit."""
    gap_s: float
    """The longest wait for tokens; for the first ones, less the undisturbed wait."""
    next_s: float
    """Seconds from the hit to the next token, prefill included."""
    freed_s: float
    whole_s: float
    resumes: int


@dataclass(slots=True)
class _Blows:
    """The processes that were hit, so that none is left stopped."""

    stopped: list[psutil.Process] = field(default_factory=list[psutil.Process])
    hit: bool = True
    last_at: float = 0.0

    def strike(self, victims: Sequence[psutil.Process], how: How) -> None:
        self.last_at = time.monotonic()
        number = signal.SIGKILL if how == "kill" else signal.SIGSTOP
        for victim in victims:
            _send(victim, number)
        if how != "kill":
            self.stopped += victims

    def strike_runners(self, places: Sequence[Place], how: How) -> None:
        victims = [psutil.Process(place.pid) for place in places if psutil.pid_exists(place.pid)]
        self.hit = self.hit and bool(victims)
        self.strike(victims, how)

    def undo(self, how: How) -> None:
        """Resumes the stopped processes or kills them."""
        number = signal.SIGCONT if how == "stop, continue" else signal.SIGKILL
        for victim in self.stopped:
            _send(victim, number)
        self.stopped.clear()


def _send(victim: psutil.Process, number: signal.Signals) -> None:
    """psutil also compares the start time, so no other process with the same pid is hit."""
    with contextlib.suppress(psutil.NoSuchProcess):  # a node may have ended the stopped runner
        victim.send_signal(number)


def attempt(
    lab: Laboratory, trial: Trial, slack_s: float = 0.0, *, together: bool = False
) -> Outcome:
    """Starts an answer, strikes, reads to its end, and waits until the laboratory is whole again.

    The limits are those of an idle machine; `slack_s` is added for a busy one. Stages that moved
    to one node may stay `together`: placing them again loads all of them.
    """
    blows = _Blows()
    head = lab.head()
    victim_node = _victim_node(lab, trial, head)
    doors = [node for node in lab.ids if node != victim_node] if trial.target == "node" else lab.ids
    answer = ask(
        lab.node(trial.chance.choice([head, *doors])),
        trial.question.prompt,
        **trial.question.fields,
    )
    try:
        _strike(lab, trial, answer, blows, victim_node)
        ended = answer.ended(4 * SILENCE_S)
    finally:
        blows.undo(trial.how)
    if trial.target == "node" and trial.how != "stop, continue":
        lab.until_ended(victim_node)  # else `until_whole` would not restart it
    freed_s = _freed(lab, FREED_WITHIN_S + slack_s)
    whole_s = lab.until_whole(together=together)
    gap_s = _gap(answer, trial.question.first_s)
    next_s = next((at - blows.last_at for at in answer.arrivals if at > blows.last_at), 0.0)
    faults = tuple(
        _faults(
            trial,
            answer,
            blows,
            slack_s,
            load_s=lab.load_s,
            ended=ended,
            gap_s=gap_s,
            freed_s=freed_s,
        )
    )
    resumes = int(answer.stats.get("resumes", 0))
    return Outcome(trial, faults, blows.hit, gap_s, next_s, freed_s, whole_s, resumes)


def _victim_node(lab: Laboratory, trial: Trial, head: str) -> str:
    """A random node with a stage, other than the head."""
    return trial.chance.choice([place.node for place in lab.places() if place.node != head])


def _strike(lab: Laboratory, trial: Trial, answer: Answer, blows: _Blows, victim_node: str) -> None:
    places = lab.places()
    length = len(trial.question.ids)
    match trial.phase:
        case "prefill":
            # The first chunk was read; chance decides how far the others are.
            blows.hit = answer.until(lambda a: a.commented("prefill") or a.ids, SILENCE_S)
            time.sleep(trial.chance.uniform(0, trial.question.first_s))
        case "decode" | "resume":
            at = trial.chance.randrange(1, max(2, length - 8))
            blows.hit = answer.until(lambda a: len(a.ids) >= at, SILENCE_S)
    if trial.phase == "resume":
        first = trial.chance.choice(places)
        blows.strike_runners([first], "kill")
        count = len(answer.ids)
        _ = answer.until(lambda a: a.commented("resuming") or len(a.ids) > count + 1, SILENCE_S)
        time.sleep(trial.chance.uniform(0, 0.5))
    match trial.target:
        case "generator" | "stage 1" | "stage 2":
            stage = 0 if trial.target == "generator" else int(trial.target[-1])
            struck = [place for place in lab.places() if place.stage == stage]
            blows.strike_runners(struck, trial.how)
        case "node":
            blows.strike(lab.processes(victim_node), trial.how)
    blows.hit = blows.hit and answer.ended_at is None


def _freed(lab: Laboratory, limit_s: float) -> float:
    """Seconds until no stage has live state; gives up after twice the limit."""
    started_at = time.monotonic()
    while lab.live_state():
        if time.monotonic() - started_at > 2 * limit_s:
            break
        time.sleep(0.05)
    return time.monotonic() - started_at


def _gap(answer: Answer, undisturbed_s: float) -> float:
    """The longest wait for tokens; for the first ones, less the undisturbed wait."""
    first, *rest = answer.gaps() or [time.monotonic() - answer.asked_at]
    return max([first - undisturbed_s, 0.0, *rest])


def _faults(
    trial: Trial,
    answer: Answer,
    blows: _Blows,
    slack_s: float,
    *,
    load_s: float,
    ended: bool,
    gap_s: float,
    freed_s: float,
) -> Iterator[str]:
    expected = trial.question.ids
    if not ended:
        yield f"hangs: no end within {4 * SILENCE_S:.0f} s"
    if answer.error:
        yield f"ended by {answer.error}"
    if tuple(answer.ids) != expected:
        yield _difference(answer.ids, expected)
    limit = slack_s + (GAP_AFTER_KILL_S if trial.how == "kill" else GAP_AFTER_STOP_S)
    # A stage's replacement is loaded and prefills again, and once more if it is lost as well.
    limit += (load_s + trial.question.first_s) * (2 if trial.phase == "resume" else 1)
    if gap_s > limit:
        yield f"a gap of {gap_s:.2f} s where {limit:.2f} s are allowed"
    if gap_s > HUNG_S + slack_s:
        yield f"hung for {gap_s:.0f} s"
    if freed_s > FREED_WITHIN_S + slack_s:
        yield f"the KV cache was freed {freed_s:.1f} s after the end"
    # During prefill a stage may be replaced before it received a part of the prompt.
    struck = blows.hit and trial.phase != "prefill"
    if struck and not answer.error and not answer.stats.get("resumes"):
        yield "the answer did not notice: the trial shows nothing"
    if answer.stats.get("resumes") and answer.stats.get("resume_exact") is not True:
        yield "resumed, but not exactly"


def _difference(ids: Sequence[int], expected: Sequence[int]) -> str:
    pairs = enumerate(zip(ids, expected, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), min(len(ids), len(expected)))
    here, there = list(ids[at : at + 6]), list(expected[at : at + 6])
    return f"{len(ids)} of {len(expected)} ids; from {at} on {here} where {there} were expected"
