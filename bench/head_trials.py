"""Trials: four answers, and a head that is killed, shut down or suspended during them."""

import random
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

import psutil
from laboratory import WHOLE_WITHIN_S, Laboratory
from listening import SILENCE_S, Answer, ask
from nodes import eventually
from trials import NEVER_END

How = Literal["kill", "exo-node stop", "hang"]
Shape = Literal["single node", "pipeline"]

HOWS: Final[tuple[How, ...]] = ("kill", "exo-node stop", "hang")
SHAPES: Final[tuple[Shape, ...]] = ("single node", "pipeline")
ANSWERS: Final = 4
GAP_S: Final = 1.0
"""The limit if no stage was lost with the head."""
GAP_WITH_STAGE_S: Final = 6.0
ENDS_WITHIN_S: Final = 240.0
STORY: Final = "Tell me a story."


@dataclass(frozen=True, slots=True)
class Blow:
    """How and when the head is hit; `stage`: whether it had a stage of the placement."""

    name: str
    shape: Shape
    how: How
    stage: bool
    after: int
    """The number of ids of every answer before the blow."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a blow, which passed if `faults` is empty."""

    blow: Blow
    faults: tuple[str, ...]
    gap_s: float
    resumes: int
    hit: int
    """The number of answers in progress when the head was hit."""

    def describe(self) -> dict[str, Any]:
        return asdict(self)


def blows(seed: int, count: int, tokens: int, shapes: Sequence[Shape] = SHAPES) -> Iterator[Blow]:
    """One shape after the other, since changing the shape is a load; all else at random."""
    for number in range(count):
        chance = random.Random(f"heads {seed}/{number}")
        shape = shapes[len(shapes) * number // count]
        yield Blow(
            f"{seed}/{number}",
            shape,
            HOWS[number % len(HOWS)],
            chance.random() < 0.5,
            chance.randrange(1, max(2, tokens // 2)),
        )


def place_for(lab: Laboratory, blow: Blow) -> None:
    """Places a stage on the head, or none there, as the blow requires."""
    head = lab.head()
    stages = 1 if blow.shape == "single node" else lab.stages
    now = [place.node for place in lab.places()] if lab.placement() else []
    if len(now) == stages and (head in now) is blow.stage:
        return
    others = [node for node in lab.ids if node != head]
    nodes = [head, *others][:stages] if blow.stage else others[:stages]
    _ = lab.place(nodes=nodes, min_nodes=stages, max_nodes=stages)
    eventually(lab.is_whole, WHOLE_WITHIN_S)


def strike(lab: Laboratory, blow: Blow, tokens: int, expected: list[int]) -> Outcome:
    """Starts answers at other nodes, strikes the head, and makes the laboratory whole again."""
    place_for(lab, blow)
    head = lab.head()
    had_stage = head in [place.node for place in lab.places()]
    doors = [node for node in lab.ids if node != head]
    fields = {"max_tokens": tokens, **NEVER_END}
    answers = [ask(lab.node(doors[i % len(doors)]), STORY, **fields) for i in range(ANSWERS)]
    for answer in answers:
        _ = answer.until(lambda a: len(a.ids) >= blow.after, ENDS_WITHIN_S)
    hit = sum(answer.ended_at is None for answer in answers)
    struck_at = time.monotonic()
    victims = _hit(lab, head, blow.how)
    ended = [answer.ended(ENDS_WITHIN_S) for answer in answers]
    _undo(victims)
    lab.until_ended(head)
    _ = lab.until_whole(together=blow.shape == "single node")
    gap = max((_gap(answer, struck_at) for answer in answers), default=0.0)
    faults = tuple(_faults(answers, ended, expected, gap, had_stage=had_stage))
    resumes = sum(int(answer.stats.get("resumes", 0)) for answer in answers)
    return Outcome(blow, faults, gap, resumes, hit)


def _hit(lab: Laboratory, head: str, how: How) -> list[psutil.Process]:
    """Returns the processes that were suspended, for `_undo`."""
    if how == "exo-node stop":
        lab.node(head).process.send_signal(signal.SIGTERM)
        return []
    if how == "kill":
        lab.node(head).process.kill()
        return []
    victims = lab.processes(head)
    for victim in victims:
        victim.suspend()
    return victims


def _undo(victims: list[psutil.Process]) -> None:
    """Resumes suspended processes, as a machine that wakes."""
    for victim in victims:
        if victim.is_running():
            victim.resume()


def _gap(answer: Answer, since: float) -> float:
    """The longest wait for ids that ended after the blow, in seconds."""
    return max(
        (gap for gap, at in zip(answer.gaps(), answer.arrivals, strict=True) if at > since),
        default=0.0,
    )


def _faults(
    answers: list[Answer],
    ended: list[bool],
    expected: list[int],
    gap: float,
    *,
    had_stage: bool,
) -> Iterator[str]:
    for answer, whole in zip(answers, ended, strict=True):
        if not whole:
            yield f"an answer hangs after {len(answer.ids)} ids"
        elif answer.error:
            yield f"an answer ended by {answer.error}"
        elif answer.ids != expected:
            yield f"{len(answer.ids)} ids of an answer differ from the {len(expected)} expected"
    limit = GAP_WITH_STAGE_S if had_stage else GAP_S
    if gap > limit:
        yield f"a gap of {gap:.2f} s where {limit:.0f} s are allowed"


def undisturbed(lab: Laboratory, tokens: int) -> list[int]:
    answer = ask(lab.node(lab.head()), STORY, max_tokens=tokens, **NEVER_END)
    assert answer.ended(ENDS_WITHIN_S) and not answer.error, answer.error
    return answer.ids


def answer_well(lab: Laboratory) -> None:
    """Requires a good answer between two trials, so that losses of one do not count in the next."""
    answer = ask(lab.node(lab.head()), "Who are you?")
    assert answer.ended(SILENCE_S) and not answer.error, answer.error


# ----------------------------------------------------------------- two machines


def lose_the_larger(lab: Laboratory, number: int, tokens: int, expected: list[int]) -> str:
    """Kills the node with most memory during an answer of the other; the failure, or ""."""
    sizes = {n["id"]: n["memory_bytes"] for n in lab.nodes()}
    larger = max(sizes, key=lambda node: sizes[node])
    [smaller] = [node for node in lab.ids if node != larger]
    _ = lab.place(nodes=[larger, smaller] if number % 2 else [smaller, larger])
    answer = ask(lab.node(smaller), STORY, max_tokens=tokens, **NEVER_END)
    _ = answer.until(lambda a: len(a.ids) >= 10 + 7 * (number % 9), ENDS_WITHIN_S)
    lab.node(larger).process.kill()
    whole = answer.ended(ENDS_WITHIN_S)
    lab.until_ended(larger)
    lab.restart()
    lab.until_alive()
    if not whole or answer.error:
        return answer.error or f"hangs after {len(answer.ids)} ids"
    return "" if answer.ids == expected else "the ids differ"
