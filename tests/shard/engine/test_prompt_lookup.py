"""Prompt lookup in the engine: who copies, in which lengths, and why others do not."""

# pyright: reportPrivateUsage=false

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from clocks import Clock
from engines import Answer, answer, request
from forced_copies import FixedLength, force
from readers import engine, prompt
from shims import by_rows, perturb
from small import small_engine

from exo_node.mtp.pieces import result_of
from exo_node.shard.engine.answers.draft_profile import DraftProfile, DraftProfileKey
from exo_node.shard.engine.answers.lookup_control import NOT_ASKED
from exo_node.shard.engine.request import Parameters
from exo_node.shard.engine.stage_copies import LENGTHS

TOKENS = 48


def parameters(
    k: int = 0, *, repeats: Sequence[int] = (), lookup: bool = True, **changes: Any
) -> Parameters:
    """`repeats`: an answer that the prompt holds, and one changed id in it, before it is asked for
    again."""
    body = list(repeats)
    if body:
        body[len(body) // 2] += 1
    rows = [*prompt(1), *body, *prompt(1)]
    return request(rows, k, TOKENS, ignore_eos=True, prompt_lookup=lookup, **changes)


def copied(result: Answer) -> int:
    return result.stats.lookup_accepted_tokens


def test_without_a_head_copies_are_the_only_drafts() -> None:
    headless = small_engine(native_mtp=False)
    force(headless.lookup, FixedLength(7))
    plain = answer(headless, parameters(lookup=False))
    result = answer(headless, parameters(repeats=plain.ids))
    assert copied(result) > 0
    assert (result.stats.drafter_kind, result.stats.draft_policy) == ("prompt_lookup", "adaptive")
    assert (plain.stats.drafter_kind, plain.stats.draft_policy) == ("none", "none")
    assert (result.end.identity, plain.end.identity) == ("bitwise", "off")
    assert plain.stats.lookup_reason == NOT_ASKED


PROFILE = DraftProfileKey("chip", "f" * 64, "float32", "0", 0)


def test_lengths_are_measured_once(tmp_path: Path) -> None:
    profile = DraftProfile.open(str(tmp_path), PROFILE, Clock())
    served = small_engine(prompt_lookup=True, context_length=512)
    result_of(served.lookup.probe(served.measurements.subject, profile))
    assert profile.copies is not None
    assert (profile.copies.lengths, profile.copies.exact) == (LENGTHS, LENGTHS)
    profile.copies = profile.copies.model_copy(update={"exact": (3,)})
    profile.save(at_once=True)
    again = DraftProfile.open(str(tmp_path), PROFILE, Clock())
    second = small_engine(prompt_lookup=True, context_length=512)
    result_of(second.lookup.probe(second.measurements.subject, again))
    lookup = second.lookup.lookup(parameters())
    assert lookup is not None and lookup.evidence.longest == 3


@pytest.mark.smoke
def test_rows_that_change_numbers_turn_it_off_with_the_reason() -> None:
    served = small_engine(prompt_lookup=True, context_length=512)
    assert perturb(served._stage.model, by_rows) > 0
    result_of(served.lookup.probe(served.measurements.subject, served.measurements.profile))
    assert "does not compute what single steps do" in served.lookup.reason(parameters())
    result = answer(served, parameters())
    assert result.stats.lookup_rounds == 0
    assert result.stats.lookup_reason == served.lookup.off_reason


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, "loaded without it"),
        ({"lookup_off_reason": "EXO_PROMPT_LOOKUP_ENABLED=0"}, "EXO_PROMPT_LOOKUP_ENABLED=0"),
        ({"prompt_lookup": True}, "not measured"),
    ],
)
def test_where_it_is_off_the_reason_is_told(changes: dict[str, Any], reason: str) -> None:
    served = engine(**changes)
    assert reason in served.lookup.reason(parameters())
    assert served.lookup.lookup(parameters()) is None
