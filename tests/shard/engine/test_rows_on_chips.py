"""On chips whose products and attention depend on the number of rows and keys, no draft, copy or
neighbour changes a token.

The engine and the model are real, and each chip's products and attention are stand-ins for Metal's
(`chips.py`). Contexts are short, or cross a border from which attention has another kernel.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import mlx.core as mx
import pytest
from chips import M1, M3_MAX, M5, Chip, as_on_a_cpu, on_chip, quantised, remedies
from engines import Answer, answer, changed, engine_of, load_quietly, request
from forced_copies import FixedLength, force
from mlx import nn
from readers import GREEDY, SEEDED, Reader, prompt, together
from small import small_spec
from zoo import VOCABULARY, tiny_config
from zoo_runs import as_two_stages, on_one_node, small, together_on_one_node

from exo_node.mtp.batch_probe import batch_identity
from exo_node.mtp.families.table import family_of
from exo_node.mtp.pieces import result_of
from exo_node.mtp.probe import Subject, exact_depth
from exo_node.mtp.targets import FamilyTarget, WholeTarget
from exo_node.shard.engine.answers.text_engine import TextEngine
from exo_node.shard.kernels import install, row_groups, row_sets
from exo_node.shard.kernels.row_groups import group_rows
from exo_node.shard.kernels.trial import KernelChoice
from exo_node.shard.model.load import Loaded
from exo_node.shard.model.stage_model import StageModel

CONTEXT = 1000
"""Below the first border of attention, 1,024 keys."""
TOKENS = 40
ACROSS = [(M3_MAX, "float32", 1012), (M5, "4 bits", 4084)]
"""Rows of prompts whose answers cross a border of attention: 1,024 and, of base chips, 4,096."""
PLACES = [
    (M1, "4 bits", 0),
    (M1, "bfloat16", 0),
    (M3_MAX, "float32", 0),
    (M3_MAX, "bfloat16", 0),
    (M3_MAX, "4 bits", 0),
    (M5, "4 bits", 0),
]
"""The products of M3 are those of M3 Max. On M1 one row and more agree in 4 bits, but for layers of
64 inputs. In 16 bits its rows are computed one by one."""


def _name(place: tuple[Chip, str, int]) -> str:
    chip, precision, rows = place
    return f"{chip.name}, {precision}{f', {rows} rows' if rows else ''}"


SAMPLINGS = {"greedy": GREEDY, "seeded": SEEDED}


@dataclass(frozen=True, slots=True)
class OnChip:
    chip: Chip
    precision: str
    rows: int
    """About how many rows prompts have, or 0: few."""
    loaded: Loaded
    answers: dict[str, Answer] = field(default_factory=dict[str, Answer])

    def engine(self, **changes: Any) -> TextEngine:
        return engine_of(self.loaded, spec_of(self.precision, self.rows, **changes))

    def prompt(self, number: int) -> list[int]:
        """Of requests that are read together, no two have as many rows."""
        end = prompt(number)
        more = self.rows - 3 * number - len(end)
        return [*prompt(number, more), *end] if self.rows else end

    def alone(self, prompt: Sequence[int], **changes: Any) -> Answer:
        """The answer to one request without drafts."""
        key = repr((prompt, changes))
        if key not in self.answers:
            request = asked(prompt, **changes)
            self.answers[key] = answer(self.engine(batching=False), request)
        return self.answers[key]


def spec_of(precision: str, rows: int = 0, **changes: Any) -> Any:
    dtype = "float32" if precision == "float32" else "bfloat16"
    context = 8 * (rows + 2 * TOKENS) if rows else CONTEXT  # shared by the requests of a batch
    fields = {"native_mtp": True, "context_length": context, "dtype": dtype}
    return small_spec(**(fields | changes))


def asked(prompt: Sequence[int], k: int = 0, **changes: Any) -> Any:
    return request(prompt, k, TOKENS, **({"ignore_eos": True, "top_logprobs": 0} | changes))


def load_on(precision: str) -> Loaded:
    """The small model as a runner loads it; of 4 bits, in groups of 32."""
    if precision != "4 bits":
        return load_quietly(spec_of(precision))
    with as_on_a_cpu():
        loaded = load_quietly(spec_of(precision))
    return quantised(loaded)


@pytest.fixture(scope="module", params=PLACES + ACROSS, ids=_name)
def served(request: pytest.FixtureRequest) -> Iterator[OnChip]:
    chip, precision, rows = request.param
    with on_chip(chip), pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_sets, "VALUES", 64)  # a coarse deviation shows in each
        yield OnChip(chip, precision, rows, load_on(precision))


@pytest.fixture(params=PLACES, ids=_name)
def ungrouped(request: pytest.FixtureRequest) -> Iterator[OnChip]:
    """The same without groups."""
    chip, precision, rows = request.param
    # Undone before the chip's own function is, or other tests would compute as on the chip.
    with on_chip(chip), pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_groups, "may_depend_on_rows", lambda: False)
        yield OnChip(chip, precision, rows, load_on(precision))


def _no_choice(*_: object) -> tuple[KernelChoice, ...]:
    return ()


@pytest.fixture(params=ACROSS, ids=_name)
def at_once(request: pytest.FixtureRequest) -> Iterator[OnChip]:
    """The same with groups, and with the attention of MLX for whole blocks."""
    chip, precision, rows = request.param
    with on_chip(chip), pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_sets, "VALUES", 64)
        patch.setattr(install, "group_keys", _no_choice)
        yield OnChip(chip, precision, rows, load_on(precision))


def test_both_identities_are_bitwise_and_drafts_may_be_copied(served: OnChip) -> None:
    engine = served.engine(prompt_lookup=True)
    engine.measurements.measure()
    assert engine.measurements.identity == engine.measurements.batch_identity == "bitwise"
    assert engine.lookup.refusal == "" and engine.lookup.shared_reason == ""


def test_without_groups_they_are_not(ungrouped: OnChip) -> None:
    engine = ungrouped.engine(prompt_lookup=True)
    engine.measurements.measure()
    assert engine.measurements.identity == engine.measurements.batch_identity == "near_tie"
    assert re.search(r"\(4 rows after 24 first differ in: product of 64 to ", engine.lookup.refusal)


def test_with_attention_at_once_one_draft_is_exact_or_none(at_once: OnChip) -> None:
    """Behind 1,024 keys M3 Max divides them as for one row for up to 4 rows times heads."""
    engine = at_once.engine(prompt_lookup=True)
    engine.measurements.measure()
    assert engine.measurements.batch_identity == "near_tie"
    assert engine.measurements.identity == ("bitwise" if at_once.chip is M3_MAX else "near_tie")
    if at_once.chip is M3_MAX:
        rows = at_once.prompt(0)
        drafted = answer(engine, asked(rows, 3, prompt_lookup=True))
        assert drafted.ids == at_once.alone(rows).ids
        assert {r.drafted for r in drafted.rounds} == {0, engine.drafting.depth} == {0, 1}
    assert re.search(r"first differ in: \w*[Aa]ttention", engine.lookup.refusal)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_drafts_change_no_token(served: OnChip, sampling: str) -> None:
    for number in range(2):
        rows, how = served.prompt(number), SAMPLINGS[sampling]
        plain = served.alone(rows, sampling=how)
        for k in (1, 2, 3):
            drafted = answer(served.engine(), asked(rows, k, sampling=how))
            assert drafted.ids == plain.ids
            assert sum(r.accepted for r in drafted.rounds) > 0


@pytest.mark.parametrize("k", [0, 3])
def test_neighbours_change_no_token(served: OnChip, k: int) -> None:
    count = 3 if served.rows > CONTEXT + 1000 else 8
    plain = [served.alone(served.prompt(i), sampling=_sampling(i)).ids for i in range(count)]
    assert not any(_differs_in_batch(served, plain, k, sampled=True))


def _sampling(number: int) -> Any:
    return SEEDED if number % 3 == 2 else GREEDY


def _differs_in_batch(
    served: OnChip, plain: Sequence[Sequence[int]], k: int, *, sampled: bool = False
) -> list[bool]:
    """Whether requests that begin one after the other, and leave, differ from `plain`.

    Long prompts were read before, so that they find their state and not each other's end.
    """
    readers = [
        Reader(
            asked(served.prompt(i), k, sampling=_sampling(i) if sampled else GREEDY),
            begins=2 * i,
            ends=21 if i == 5 else None,
        )
        for i in range(len(plain))
    ]
    engine = served.engine(prefix_cache_bytes=1 << 28 if served.rows else 0)
    engine.measurements.batch_identity = "bitwise"
    engine.measurements.shares_prompts = True
    if served.rows:
        for reader in readers:
            _ = answer(engine, changed(reader.request, name="", max_tokens=1))
    together(engine, readers)
    assert all(not served.rows or r.end is None or r.end.stats.cached_tokens for r in readers)
    batched = [r.end.stats.batched_tokens for r in readers if r.end is not None]
    assert all(batched), batched
    return [tuple(r.ids) != tuple(plain[i])[: len(r.ids)] for i, r in enumerate(readers)]


def test_prompts_of_unlike_lengths_are_not_read_together(served: OnChip) -> None:
    """Products compute 65 rows and more of one request as one call, padding included."""
    prompts = [prompt(1, 100), prompt(2, 20), prompt(3, 70)]
    engine = served.engine()
    engine.measurements.batch_identity = "bitwise"
    engine.measurements.shares_prompts = True
    readers = [Reader(asked(each)) for each in prompts]
    together(engine, readers)
    for reader, rows in zip(readers, prompts, strict=True):
        assert tuple(reader.ids) == served.alone(rows).ids


def test_copies_change_no_token(served: OnChip) -> None:
    body, end = served.alone(served.prompt(1)).ids, prompt(1)
    rows = [*served.prompt(1), *body, *end][-served.rows :]
    plain = served.alone(rows)
    for length in (3, 7):
        engine = served.engine(prompt_lookup=True)
        force(engine.lookup, FixedLength(length))
        copied = answer(engine, asked(rows, prompt_lookup=True))
        assert copied.ids == plain.ids and copied.stats.lookup_proposed_tokens > 0


@pytest.mark.parametrize("k", [0, 2])
def test_a_resumed_answer_goes_on_with_the_same_tokens(served: OnChip, k: int) -> None:
    plain = served.alone(served.prompt(0))
    rounds = answer(served.engine(), asked(served.prompt(0), k)).rounds
    for cut in (1, len(rounds) // 2, len(rounds) - 1):
        log = rounds[:cut]
        rest = answer(served.engine(), asked(served.prompt(0), k, attempt=2, replay=log))
        assert (*(t for r in log for t in r.tokens), *rest.ids) == plain.ids


@pytest.mark.parametrize(
    "name",
    [
        *("llama", "qwen2", "qwen3_moe", "gemma3_text", "gpt_oss", "cohere", "phi3", "nemotron_h"),
        *("deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite", "minimax", "qwen3_next"),
    ],
)
def test_other_classes_are_exact_too(name: str) -> None:
    """With biases, experts, routers, windows, tied embeddings, latent attention and recurrent
    layers."""
    assert depth_of(name, grouped=True) == 7
    assert depth_of(name, grouped=False) == 0


def depth_of(name: str, *, grouped: bool) -> int:
    """`exact_depth` of a tiny model of mlx-lm's class on M3 Max."""
    with on_chip(M3_MAX), pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_sets, "VALUES", 64)
        model: Any = small({**tiny_config(name), "vocab_size": 160})
        stage = StageModel(model, 0, len(model.layers))
        if grouped:
            assert group_rows(stage.own_modules(outer=True), mx.float32, perf_counter)
        return result_of(exact_depth(subject_of(model, stage, CONTEXT), 7))


def subject_of(model: nn.Module, stage: StageModel, context: int) -> Subject:
    family = family_of(model)
    target = WholeTarget(model) if family is None else FamilyTarget(family)
    return Subject(target, stage.make_caches, 160, context, lambda: 0.0)


@pytest.mark.parametrize(
    ("name", "batches"),
    [
        ("deepseek_v3", "bitwise"),
        ("glm4_moe_lite", "bitwise"),
        ("longcat_flash", "bitwise"),
        ("deepseek_v32", "near_tie"),  # its rows do not attend over their own keys in batches
    ],
)
def test_latent_attention_is_exact_across_a_border_and_says_so(name: str, batches: str) -> None:
    """Scores of rotary keys are products without weights, of heads times rows."""
    with on_chip(M3_MAX), pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_sets, "VALUES", 64)
        model: Any = small({**tiny_config(name), "vocab_size": 160})
        model.set_dtype(mx.bfloat16)
        stage = StageModel(model, 0, len(model.layers))
        _ = remedies(stage, mx.bfloat16)
        assert result_of(exact_depth(subject_of(model, stage, 2000), 3)) == 3
        assert result_of(batch_identity(subject_of(model, stage, CONTEXT), 3)) == "bitwise"
        assert result_of(batch_identity(subject_of(model, stage, 2000), 3)) == batches


SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "4 heads of 2": ("llama", {"num_attention_heads": 4, "num_key_value_heads": 2}),
    "4 heads of 1": ("llama", {"num_attention_heads": 4, "num_key_value_heads": 1}),
    "6 heads of 1": ("llama", {"num_attention_heads": 6, "num_key_value_heads": 1}),
    "8 heads of 1": ("llama", {"num_attention_heads": 8, "num_key_value_heads": 1}),
    "a window": ("gemma3_text", {"sliding_window": 1024}),
    "experts": ("qwen3_moe", {}),
    "mxfp4": ("llama", {}),
}


@pytest.mark.parametrize("name", SHAPES)
def test_batches_stages_and_blocks_change_nothing_across_a_border(name: str) -> None:
    kind, changes = SHAPES[name]
    config = {**tiny_config(kind), **changes}
    prompts = [prompt_of(rows) for rows in (1013, 1018, 1010)]
    with on_chip(M3_MAX), pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_sets, "VALUES", 64)
        model: Any = small(config)
        if name == "mxfp4":
            nn.quantize(model, group_size=32, bits=4, mode="mxfp4")
        stage = StageModel(model, 0, len(model.layers))
        with pytest.MonkeyPatch.context() as without:
            without.setattr(install, "group_keys", _no_choice)
            _ = remedies(stage, mx.float32)
        assert not _block_is_steps(stage)  # attention at once
        _ = remedies(stage, mx.float32)
        assert _block_is_steps(stage)
        alone = [on_one_node(model, 253, 16, rows) for rows in prompts]
        assert together_on_one_node(model, prompts, 253, 16) == alone
        assert stage.reads_ends
        for prompt, ids in zip(prompts, alone, strict=True):  # 1 and 6 rows in the last chunk
            assert as_two_stages(model, config, 2, 253, 16, prompt) == ids


def prompt_of(rows: int) -> list[int]:
    return [(37 * rows + 11 * i) % (VOCABULARY - 1) + 1 for i in range(rows)]


def _block_is_steps(stage: StageModel) -> bool:
    """Whether four rows have the bits of single steps; the third of them reads 1,024 keys."""
    tokens = mx.array([prompt_of(1025)])
    blocks, steps = stage.make_caches(), stage.make_caches()
    for start in range(0, 1021, 256):
        for caches in (blocks, steps):
            mx.eval(stage.hidden(tokens[:, start : min(start + 256, 1021)], None, caches))
    block = stage.hidden(tokens[:, 1021:], None, blocks)
    each = [stage.hidden(tokens[:, i : i + 1], None, steps) for i in range(1021, 1025)]
    return bool(mx.array_equal(block, mx.concatenate(each, axis=1)).item())
