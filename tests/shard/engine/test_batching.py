"""Answers that share forwards are those that they are alone, whoever joins, leaves or stalls."""

import math
import random
from collections import deque
from typing import Any

import pytest
from budget import seeds
from engines import answer, request
from models import DEMO
from readers import Reader, alone, engine, prompt, together
from zoo import VOCABULARY, tiny_config
from zoo_runs import small

from exo_node.mtp import parts
from exo_node.mtp.batch import Batch, Member
from exo_node.mtp.batch_prompts import PromptBatch
from exo_node.mtp.types import Penalties, Round, Sampling
from exo_node.shard.engine.compute import Run, Turns
from exo_node.shard.engine.engine import TextEngine
from exo_node.shard.engine.local import FamilyTarget
from exo_node.shard.engine.options import EngineOptions
from exo_node.shard.model.stage_model import StageModel
from exo_node.shard.text.codec import TextCodec

GREEDY = Sampling()
SEEDED = Sampling(temperature=0.9, top_p=0.95, seed=11)
PENALISED = Sampling(penalties=Penalties(repetition=1.3, logit_bias=((7, 2.0),)))


@pytest.fixture(autouse=True)
def prompts_have_one_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is in a batch when depends on turns alone, on a busy machine too."""
    for least in ("LEAST_S", "MOST_S"):
        monkeypatch.setattr(parts, least, math.inf)


@pytest.mark.parametrize("ahead", [False, True], ids=["one by one", "ahead"])
def test_sixteen_with_different_lengths_drafts_samplers_and_ends_are_their_solo_runs(
    *, ahead: bool
) -> None:
    kinds = [GREEDY, SEEDED, PENALISED, Sampling(temperature=0.7, top_k=5, seed=3)]
    readers = [
        Reader(
            request(prompt(i, (0, 90, 7)[i % 3]), i % 4, 12 + 2 * i, sampling=kinds[i % 5 % 4]),
            begins=(0, 0, 3, 9)[i % 4],
            stalls=range(20, 33) if i == 5 else range(0),
        )
        for i in range(16)
    ]
    served = engine(runs_ahead=ahead)
    together(served, readers)
    for reader in readers:
        wanted = alone(reader.asked)
        assert tuple(reader.ids) == wanted.ids
        assert reader.done is not None and reader.done.reason == wanted.done.reason
        assert reader.done.text == wanted.done.text
    assert max(r.forward.batch for each in readers for r in each.rounds) >= 12
    assert served.live_requests == 0 and served.cache_bytes() == 0


@pytest.mark.smoke
@pytest.mark.parametrize("seed", seeds(2, 12))
def test_random_joins_cancels_and_stalls_leave_every_answer_its_own(seed: int) -> None:
    draw = random.Random(seed)
    readers = list[Reader]()
    for number in range(12):
        begins = draw.randrange(60)
        stall = draw.randrange(begins, begins + 40)
        asked = request(
            prompt(number, draw.choice([0, 5, 60, 130])),
            draw.randrange(4),
            draw.randrange(1, 40),
            sampling=draw.choice([GREEDY, GREEDY, SEEDED]),
            adaptive=draw.random() < 0.5,
        )
        readers.append(
            Reader(
                asked,
                begins,
                draw.choice([None, None, begins + draw.randrange(40)]),
                draw.choice([range(0), range(stall, stall + draw.randrange(30))]),
            )
        )
    served = engine(runs_ahead=bool(seed % 2))
    together(served, readers)
    for reader in readers:
        wanted = alone(reader.asked).ids
        if reader.ends is None:
            assert tuple(reader.ids) == wanted
        else:
            assert tuple(reader.ids) == wanted[: len(reader.ids)]
    assert served.live_requests == 0 and served.cache_bytes() == 0


@pytest.mark.parametrize("k", [0, 1, 3])
def test_sampling_without_a_seed_uses_the_same_noise_as_alone(
    monkeypatch: pytest.MonkeyPatch, k: int
) -> None:
    """Rounds begin at the same rows with a fixed K, so that block and ratio acceptance agree."""

    def entropy(bits: int) -> int:
        return 20261122 % (1 << bits)

    monkeypatch.setattr("exo_node.shard.engine.live.secrets.randbits", entropy)
    hot = Sampling(temperature=1.0, top_p=0.9)
    readers = [Reader(request(prompt(i), k, 24, sampling=hot), begins=4 * i) for i in range(5)]
    together(engine(), readers)
    for reader in readers:
        wanted = alone(reader.asked)
        assert tuple(reader.ids) == wanted.ids
        rounds = [(r.drafted, r.accepted, r.forward.position) for r in reader.rounds]
        assert rounds == [(r.drafted, r.accepted, r.forward.position) for r in wanted.rounds]


def test_prompts_are_read_together_as_far_as_a_chunk_has_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    groups = list[list[int]]()
    read = PromptBatch._read  # pyright: ignore[reportPrivateUsage]

    def seen(self: PromptBatch, group: Any) -> None:
        groups.append([ask.tokens.shape[0] for ask in group])
        read(self, group)

    monkeypatch.setattr(PromptBatch, "_read", seen)
    rows = [30, 50, 40, 300, 20, 9, 10]
    readers = [Reader(request(prompt(i, n), 1, 12)) for i, n in enumerate(rows)]
    together(engine(), readers)
    assert groups[0] == [30, 50, 40] and len(groups) > 1
    assert all(len(group) * max(group) <= 160 for group in groups)
    for reader in readers:
        assert tuple(reader.ids) == alone(reader.asked).ids


def test_who_is_cancelled_while_others_wait_for_its_prompt_holds_nobody_up() -> None:
    readers = [Reader(request(prompt(i, 40), 1, 12), ends=2 if i == 0 else None) for i in range(4)]
    served = engine()
    together(served, readers)
    for reader in readers[1:]:
        assert tuple(reader.ids) == alone(reader.asked).ids
    assert served.live_requests == 0


def test_prefixes_of_prompts_that_were_read_together_are_the_cold_ones() -> None:
    served = engine(prefix_cache_bytes=256 << 20)
    system = [*prompt(77, 200), 4095]
    asked = [[*system, *prompt(i, 20 + 7 * i)] for i in range(4)]
    wanted = [alone(request(ids, 2, 12)).ids for ids in asked]
    for least in (0, 150):
        readers = [Reader(request(ids, 2, 12)) for ids in asked]
        together(served, readers)
        assert [tuple(reader.ids) for reader in readers] == wanted
        for reader in readers:
            assert reader.done is not None and reader.done.stats.cached_tokens >= least


def test_an_answer_that_is_left_alone_goes_on_alone_and_the_stats_tell() -> None:
    long, short = (
        Reader(request(prompt(0), 2, 60, ignore_end=True)),
        Reader(request(prompt(1), 2, 10, ignore_end=True), begins=6),
    )
    together(engine(), [long, short])
    sizes = [r.forward.batch for r in long.rounds]
    assert sizes[0] == sizes[-1] == 1 and 2 in sizes
    assert tuple(long.ids) == alone(long.asked).ids
    assert long.done is not None and short.done is not None
    stats = long.done.stats
    assert 0 < stats.batched_tokens < 60 and 1 < stats.batch_size < 2
    assert stats.batching_reason == ""


@pytest.mark.parametrize(("k", "ahead"), [(2, False), (0, True)])
def test_a_reader_that_stalls_leaves_once_and_the_others_go_on_undisturbed(
    monkeypatch: pytest.MonkeyPatch, k: int, *, ahead: bool
) -> None:
    formed, left_out = list[int](), list[int]()
    reform = Batch._reform  # pyright: ignore[reportPrivateUsage]

    def counted(self: Batch) -> None:
        reform(self)
        formed.append(self.size)
        left_out.append(len(self._waiting))  # pyright: ignore[reportPrivateUsage]

    monkeypatch.setattr(Batch, "_reform", counted)
    tokens = 40 if k else 70
    readers = [Reader(request(prompt(i), k, tokens, ignore_end=True)) for i in range(4)]
    readers[1].stalls = range(20, 50)
    together(engine(runs_ahead=ahead), readers)
    # It joins, stalls, comes back; and the others' ends. Not once for each round that it missed.
    assert len(formed) < 12
    assert max(left_out) == 1  # itself
    for reader in readers:
        assert tuple(reader.ids) == alone(reader.asked).ids


@pytest.mark.parametrize("ahead", [False, True], ids=["one by one", "ahead"])
def test_nobody_is_left_out_of_a_round_for_want_of_a_turn(
    monkeypatch: pytest.MonkeyPatch, *, ahead: bool
) -> None:
    """Prompts end while others answer, some of them together; nobody stalls."""
    left_out, waited, anew = list[int](), list[int](), list[int]()
    reform, form = Batch._reform, Batch._form  # pyright: ignore[reportPrivateUsage]
    served, readers = engine(runs_ahead=ahead), list[Reader]()

    def formed(self: Batch) -> None:
        reform(self)
        left_out.append(len(self._waiting))  # pyright: ignore[reportPrivateUsage]
        single = [r for r in readers if r.rounds and len(r.ids) < 24]
        waited.append(len(single) - len(self._members))  # pyright: ignore[reportPrivateUsage]

    def copied(self: Batch, *args: Any) -> None:
        form(self, *args)
        anew.append(self.size)

    monkeypatch.setattr(Batch, "_reform", formed)
    monkeypatch.setattr(Batch, "_form", copied)
    for i in range(9):
        asked = request(prompt(i, 25), (0, 0, 2)[i % 3], 24, ignore_end=True)
        readers.append(Reader(asked, begins=(0, 25, 70)[i // 3]))
    in_turns(served, readers)
    assert left_out and set(left_out) == {0}
    assert len(anew) == 1 < len(left_out)  # the others change it where it is
    assert set(waited) == {0}  # whoever has its first token shares the next forward
    assert max(r.forward.batch for r in readers[-1].rounds) >= 8
    for reader in readers:
        assert tuple(reader.ids) == alone(reader.asked).ids


def in_turns(served: TextEngine, readers: list[Reader]) -> None:
    """As the compute thread steps them; each comes behind so many turns of all."""
    turns, inbox, count = Turns(), deque[Run](), 0
    coming, live = list(readers), list(readers)
    while live:
        while coming and coming[0].begins <= count:
            reader = coming.pop(0)

            def done(fault: BaseException | None, reader: Reader = reader) -> None:
                reader.fault = fault
                live.remove(reader)

            inbox.append(Run(served.generate(reader.asked), reader.take, done, inbox.append))
        while inbox:
            turns.add(inbox.popleft())
        if (run := turns.next()).turn():
            turns.add(run)
        elif run.waited:
            turns.spare()
        count += 1


@pytest.mark.parametrize("ahead", [False, True], ids=["one by one", "ahead"])
def test_what_follows_is_computed_first_only_where_that_takes_nobodys_time(
    monkeypatch: pytest.MonkeyPatch, *, ahead: bool
) -> None:
    """On a CPU those that wait for a token would wait for two."""
    forwards, told = list[int](), list[tuple[int, int]]()
    forward, take = FamilyTarget.forward_batch, Batch.take

    def counted(target: FamilyTarget, *args: Any) -> Any:
        forwards.append(1)
        return forward(target, *args)

    def taken(self: Batch, member: Member) -> Round:
        before, rounds = len(forwards), len(member.rounds)
        got = take(self, member)
        told.append((len(forwards) - before, rounds))
        return got

    monkeypatch.setattr(FamilyTarget, "forward_batch", counted)
    monkeypatch.setattr(Batch, "take", taken)
    together(engine(runs_ahead=ahead), [Reader(request(prompt(i), 0, 20)) for i in range(3)])
    most = max(count for count, _ in told)
    assert most == (2 if ahead else 1)
    assert all(count == 0 for count, rounds in told if rounds)


def test_one_alone_never_sees_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    def taken(batch: Batch, member: Member) -> Round:
        raise AssertionError("it was alone")

    monkeypatch.setattr(Batch, "take", taken)
    got = answer(engine(), request(prompt(0), 3, 40))
    assert {r.forward.batch for r in got.rounds} == {1}
    assert got.stats.batched_tokens == 0 and got.stats.batch_size == 1


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"batching": False}, "EXO_BATCHING_ENABLED is 0"),
        ({"fixed_rows": 4}, "strict mode computes each request by forwards of its own"),
    ],
)
def test_what_is_not_batched_says_why(changes: dict[str, Any], reason: str) -> None:
    served = engine(**changes)
    readers = [Reader(request(prompt(i), 1, 8)) for i in range(2)]
    together(served, readers)
    for reader in readers:
        assert reader.done is not None and reader.done.stats.batching_reason == reason
        assert {r.forward.batch for r in reader.rounds} == {1}


def test_a_long_context_beside_short_ones_does_not_blow_up_their_memory() -> None:
    served = engine()
    peak = list[int]()
    readers = [Reader(request(prompt(9, 1200), 1, 30, ignore_end=True))]
    readers += [Reader(request(prompt(i, 9), 1, 40, ignore_end=True)) for i in range(7)]
    together(served, readers, lambda _: peak.append(served.cache_bytes()))
    own = sum(_most_held_alone(reader) for reader in readers)
    assert max(r.forward.batch for r in readers[1].rounds) >= 7
    assert max(peak) < 3 * own


def _most_held_alone(reader: Reader) -> int:
    served, held = engine(batching=False), list[int]()
    single = Reader(reader.asked)
    together(served, [single], lambda _: held.append(served.cache_bytes()))
    assert reader.ids == single.ids
    return max(held)


@pytest.mark.smoke
@pytest.mark.parametrize("family", ["llama", "qwen3_next", "deepseek_v3", "glm4_moe", "mamba2"])
def test_other_families_compute_the_same_together(family: str) -> None:
    """Attention, latent attention, mixtures of experts and recurrences, with random weights."""
    model = small(tiny_config(family))
    asked = [request([(7 * i + j) % VOCABULARY for j in range(9 + 5 * i)], 0, 24) for i in range(4)]
    served, solo = (zoo_engine(model, batching=on) for on in (True, False))
    readers = [Reader(each) for each in asked]
    together(served, readers)
    assert max(r.forward.batch for each in readers for r in each.rounds) == 4
    assert [tuple(r.ids) for r in readers] == [answer(solo, each).ids for each in asked]


@pytest.mark.parametrize("family", ["gpt_oss", "gemma3n"])
def test_windows_turn_in_a_batch_as_they_do_alone(family: str) -> None:
    """Windows of 8 rows: prompts shorter and longer than one, joins, one that goes on alone.

    gpt_oss has sinks; layers of gemma3n attend to the keys of others.
    """
    model = small(tiny_config(family))
    sizes = [(3, 30), (8, 44), (21, 17), (37, 25)]
    asked = [
        request([(7 * i + j) % VOCABULARY for j in range(rows)], 0, tokens, ignore_end=True)
        for i, (rows, tokens) in enumerate(sizes)
    ]
    served, solo = (zoo_engine(model, batching=on) for on in (True, False))
    readers = [Reader(each, begins=(0, 0, 7, 3)[i]) for i, each in enumerate(asked)]
    together(served, readers)
    assert all(max(r.forward.batch for r in each.rounds) >= 3 for each in readers)
    assert readers[1].rounds[-1].forward.batch == 1
    served.probe()
    assert served.batch_identity == "bitwise"
    assert [tuple(r.ids) for r in readers] == [answer(solo, each).ids for each in asked]


def test_a_model_whose_probe_fails_is_decoded_alone_and_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_batch(*_: object) -> object:
        raise TypeError("offset must be an int\nSignatures: ...")

    served = engine()
    monkeypatch.setattr("exo_node.shard.engine.local.FamilyTarget.forward_batch", no_batch)
    served.probe()
    readers = [Reader(request(prompt(i), 1, 8)) for i in range(2)]
    together(served, readers)
    wanted = "this model cannot be computed in batches (TypeError: offset must be an int)"
    for reader in readers:
        assert reader.done is not None and reader.done.stats.batching_reason == wanted
        assert tuple(reader.ids) == alone(reader.asked).ids


def zoo_engine(model: Any, *, batching: bool) -> TextEngine:
    options = EngineOptions("float32", 4096, prefill_chunk=160, batching=batching)
    return TextEngine(
        TextCodec.load(DEMO), StageModel(model, 0, len(model.layers)), VOCABULARY, options
    )
