"""Answers that share rounds over stages are those of each alone."""

# mlx is typed in part only.
# pyright: reportUnknownMemberType=false

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest
from lanes import THREE, TWO, Split, alone, asks, few_tokens, lost_of, readers_of, tokens_of
from readers import Reader, prompt, together

from exo_node.mtp.types import Sampling
from exo_node.shard.engine.groups import StageGroup
from exo_node.shard.engine.stage_rounds import StageRounds
from exo_node.shard.engine.state import State
from exo_node.shard.model.stage_model import StageModel
from exo_node.shard.model.tensors import to_bytes

SEEDED = Sampling(temperature=0.8, seed=4)


def batches(reader: Reader) -> set[int]:
    return {round_.forward.batch for round_ in reader.rounds}


@pytest.mark.smoke
@pytest.mark.parametrize("bounds", [TWO, THREE])
def test_answers_that_share_rounds_are_those_that_they_are_alone(bounds: Sequence[int]) -> None:
    """They join, end, stall and are cancelled; groups are as many as stages."""
    split, readers = Split(bounds), readers_of(6)
    readers[1].request = replace(readers[1].request, sampling=SEEDED)
    readers[2].stalls = range(24, 40)
    readers[4].ends = 30
    together(split.engine, readers)
    for reader in readers:
        expected = alone(reader.request)
        assert reader.fault is None
        assert tokens_of(reader) == expected[: len(reader.rounds) if reader is readers[4] else None]
    most = -(-6 // (len(bounds) - 1))
    assert max(split.link.rounds) == max(itertools.chain(*map(batches, readers))) == most
    end = readers[0].end
    assert end is not None and end.batch_identity == "bitwise"
    assert end.stats.batching_reason == "" and end.stats.batched_tokens
    assert not split.leftovers


@pytest.mark.parametrize("bounds", [TWO, THREE])
def test_no_more_answers_than_stages_have_rounds_of_their_own(bounds: Sequence[int]) -> None:
    """They keep all stages busy."""
    split, readers = Split(bounds), readers_of(len(bounds) - 1)
    together(split.engine, readers)
    assert [batches(reader) for reader in readers] == [{1}] * len(readers)
    assert set(split.link.rounds) == {1}


def test_a_group_is_trimmed_where_fewer_answers_are_left() -> None:
    """The answers of one group end first: the other one would leave a stage without work."""
    split, readers = Split(), [Reader(asks(prompt(i), 16)) for i in range(6)]
    ended, before = set[str](), 0

    def all_of_one_group(turn: int) -> None:
        nonlocal before
        lanes = [{m.request for m in block.members} for block in split.link.sent[-2:]]
        if ended or any(len(lane) < 3 for lane in lanes) or lanes[0] == lanes[1]:
            return
        ended.update(lanes[0])
        before = len(split.link.rounds)
        for reader in readers:
            if reader.request.request in ended:
                reader.ends = turn + 1

    together(split.engine, readers, all_of_one_group)
    after = split.link.rounds[before:]
    assert set(after[:4]) <= {1, 2, 3} and after.count(3) <= 1, "one may have been planned"
    assert len(after) > 8 and set(after[4:]) == {1, 2}
    for reader in readers:
        expected = alone(reader.request)
        assert tokens_of(reader) == expected[: len(reader.rounds)]
        assert (len(reader.rounds) < 16) == (reader.request.request in ended)


def test_a_group_is_formed_anew_only_where_others_than_before_share_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    changes = list[object]()
    change = StageGroup[Any].change

    def counted(self: StageGroup[Any], *args: Any) -> None:
        changes.append(args)
        change(self, *args)

    monkeypatch.setattr(StageGroup, "change", counted)
    split = Split()
    readers = [Reader(asks(prompt(i), 40)) for i in range(4)]
    together(split.engine, readers)
    assert len([size for size in split.link.rounds if size == 2]) > 60
    assert 0 < len(changes) < 16, "of two groups on two stages"


# ------------------------------------------------------------------------- rows of a stage's rounds


class Rows:
    """Rounds of one stage, behind hidden states that nobody computed."""

    HIDDEN = 64

    def __init__(self, first: int) -> None:
        number = (0, 1)[first > 0]
        part = Split().parts[number]
        self._is_first = first == 0
        self._model = part.model
        self.over = set[str]()
        self.rounds = StageRounds[str](part.model, mx.float32, lambda name: name not in self.over)
        self._alone: dict[str, list[Any]] = {}
        self._draws = itertools.count(1)

    def begin(self, name: str, rows: int) -> None:
        ids, entering = mx.array([list(range(5, 5 + rows))]), self._noise(1, rows)
        states = [State(self._model.make_caches(), rows) for _ in range(2)]
        for state in states:
            mx.eval(self._model.hidden(ids, entering, state.caches))
        self.rounds.groups.single[name], self._alone[name] = states[0], states[1].caches

    def round(self, names: Sequence[str]) -> bool:
        """Whether its rows are those of each by itself."""
        tokens = [7 + next(self._draws) for _ in names]
        entering = self._noise(len(names), 1)
        got = self.rounds.row(names, tokens, entering)
        expected = list[bytes]()
        for index, (name, token) in enumerate(zip(names, tokens, strict=True)):
            own = None if entering is None else entering[index : index + 1]
            row = self._model.hidden(mx.array([[token]]), own, self._alone[name])
            expected.append(to_bytes(row))
        return got == b"".join(expected)

    def end(self, name: str) -> None:
        self.over.add(name)
        self.rounds.groups.release(name)
        del self._alone[name]

    def _noise(self, count: int, rows: int) -> mx.array | None:
        if self._is_first:
            return None
        return mx.random.normal((count, rows, self.HIDDEN), key=mx.random.key(next(self._draws)))


@pytest.mark.smoke
@pytest.mark.parametrize("first", [0, 2])
def test_rows_come_in_the_order_of_the_block_whatever_a_stages_own_is(first: int) -> None:
    """A stage that joined or lost others at another time has its groups in another order."""
    rows = Rows(first)
    for number, name in enumerate("abcd"):
        rows.begin(name, 3 + 2 * number)
    assert rows.round("abc")
    assert [group.requests for group in rows.rounds.groups.groups] == [("a", "b", "c")]
    assert rows.round("cab") and rows.round("bca") and rows.round("dbca")
    assert [group.requests for group in rows.rounds.groups.groups] == [("a", "b", "c", "d")]
    assert rows.round("dcba") and rows.round("adbc")


@pytest.mark.parametrize("first", [0, 2])
def test_rows_of_any_groups_are_those_of_each_alone(first: int) -> None:
    """They join, change places, go on by themselves and end."""
    shared = 0
    for seed in range(2):
        rows, draw, names = Rows(first), random.Random(seed), list[str]()
        for number in range(50):
            if len(names) < 2 or (len(names) < 6 and draw.random() < 0.2):
                names.append(f"r{number}")
                rows.begin(names[-1], draw.randrange(1, 30))
            elif draw.random() < 0.1:
                rows.end(names.pop(draw.randrange(len(names))))
            else:
                chosen = draw.sample(names, draw.randrange(1, min(3, len(names)) + 1))
                assert rows.round(chosen)
                shared += len(chosen) > 1
        for name in names:
            rows.end(name)
        assert not rows.rounds.groups.bytes
    assert shared > 40


@pytest.mark.smoke
def test_nobody_goes_on_with_rows_of_a_forward_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Rows(2)
    for name in "abc":
        rows.begin(name, 3)
    assert rows.round("ab")

    def failing(*_: object) -> mx.array:
        raise RuntimeError("[malloc] out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(StageModel, "hidden", failing)
        with pytest.raises(RuntimeError):
            _ = rows.rounds.row("a", [8], mx.zeros((1, 1, Rows.HIDDEN)))
    groups = rows.rounds.groups
    assert sorted(groups.forget(["a"])) == ["a"], "b was by itself already"
    assert set(groups.single) == {"b", "c"} and not groups.groups
    assert rows.round("cb")
    assert sorted(groups.forget(["b"])) == ["b", "c"], "who shared its caches"
    assert not groups.bytes


# ---------------------------------------------------------------------------- what is not the same


@pytest.mark.parametrize("bounds", [TWO, pytest.param(THREE, marks=pytest.mark.smoke)])
def test_what_a_stage_computes_otherwise_together_is_said(
    bounds: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the stages behind it do not."""
    split, readers = Split(bounds), few_tokens(2 * (len(bounds) - 1))
    split.workers[0].probe()
    rounds = split.workers[0]._rounds  # pyright: ignore[reportPrivateUsage]
    assert rounds.is_same and not rounds.batching_reason and not rounds.groups.bytes
    hidden = StageModel.hidden

    def by_batch(model: StageModel, tokens: mx.array, *rest: Any) -> mx.array:
        differs = model.first == bounds[1] and tokens.shape[0] > 1
        return hidden(model, tokens, *rest) * (1 + 1e-6 * differs)

    monkeypatch.setattr(StageModel, "hidden", by_batch)
    split.workers[0].probe()
    assert not rounds.is_same
    together(split.engine, readers)
    assert [r.end.batch_identity for r in readers if r.end] == ["near_tie"] * len(readers)


def test_what_the_generators_stage_computes_otherwise_together_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    split, readers = Split(), few_tokens(4)
    hidden = StageModel.hidden

    def by_batch(model: StageModel, tokens: mx.array, *rest: Any) -> mx.array:
        differs = model.first == 0 and tokens.shape[0] > 1
        return hidden(model, tokens, *rest) * (1 + 1e-6 * differs)

    monkeypatch.setattr(StageModel, "hidden", by_batch)
    split.engine.probe()
    together(split.engine, readers)
    assert [r.end.batch_identity for r in readers if r.end] == ["near_tie"] * len(readers)


@pytest.mark.parametrize("changes", [{"batching": False}, {"fixed_rows": 4}])
def test_what_is_turned_off_is_not_shared(changes: dict[str, Any]) -> None:
    split, readers = Split(**changes), readers_of(4)
    together(split.engine, readers)
    assert set(split.link.rounds) == {1}
    assert all(reader.end and reader.end.stats.batching_reason for reader in readers)


@pytest.mark.parametrize("first", [0, 2])
def test_layers_that_compute_no_batch_are_passed_one_request_at_a_time(
    first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A generator's share no rounds; another stage's take a round apart."""
    split, readers = Split(), readers_of(4)
    hidden, passed = StageModel.hidden, list[int]()

    def refused(model: StageModel, tokens: mx.array, *rest: Any) -> mx.array:
        if tokens.shape[0] > 1 and model.first == first:
            raise TypeError("offset must be an int")
        return hidden(model, tokens, *rest)

    monkeypatch.setattr(StageModel, "hidden", refused)
    if first:
        split.workers[0].probe()
    else:
        split.engine.probe()
    together(split.engine, readers)
    assert not passed and not lost_of(readers)
    assert max(split.link.rounds) == (2 if first else 1)
    assert all(tokens_of(reader) == alone(reader.request) for reader in readers)
    reasons = [reader.end.stats.batching_reason for reader in readers if reader.end]
    assert all("cannot be computed in batches" in why for why in reasons) == (first == 0)
