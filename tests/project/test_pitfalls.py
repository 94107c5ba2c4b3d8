"""The known ways in which native multi-token prediction goes wrong: an index of their tests.

1 to 26 were compiled from the pull requests and issues of the projects that are named; the others
were found beside them.
"""

import ast
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

TESTS = Path(__file__).parents[1]
ROUNDS = "mtp/test_rounds.py"
ANSWERS = "shard/engine/test_drafted_answers.py"
HEADS = "shard/checkpoint/test_broken_heads.py"
ENGINE = "shard/engine/test_engine.py"
MODES = "shard/engine/test_engine_modes.py"


class Pitfall(NamedTuple):
    """A fault, where it was seen, and the test that would see it here."""

    number: int
    fault: str
    seen_in: str
    file: str
    test: str


INDEX = tuple(
    Pitfall(*row)
    for row in (
        (
            1,
            "a hole in the head's cache after a full accept",
            "exo#2110, mlx-lm#990",
            ROUNDS,
            "test_the_heads_cache_has_no_hole_after_a_full_accept",
        ),
        (
            2,
            "the prompt is prefilled twice, or token by token",
            "exo#2110",
            ROUNDS,
            "test_the_prompt_is_prefilled_once_and_not_token_by_token",
        ),
        (
            3,
            "penalties are silently dropped",
            "exo#2110",
            ROUNDS,
            "test_a_penalty_holds_within_a_block_of_drafts",
        ),
        (
            4,
            "log-probabilities are zeros",
            "exo#2110",
            MODES,
            "test_log_probabilities_are_the_targets_at_every_k",
        ),
        (
            5,
            "counts are zero when a stop string ends the answer",
            "exo#2110",
            ANSWERS,
            "test_counts_are_right_when_a_stop_string_ends_the_answer",
        ),
        (
            6,
            "a final event repeats the last token, which counts twice",
            "exo#2110",
            ENGINE,
            "test_float32_reproduces_the_oracle",
        ),
        (
            7,
            "the head's weights are loaded although opted out",
            "exo#2110",
            ENGINE,
            "test_without_native_mtp_the_heads_weights_are_not_read",
        ),
        (
            8,
            "errors of cache repair are swallowed",
            "exo#2110",
            ANSWERS,
            "test_an_error_of_cache_repair_ends_the_answer",
        ),
        (
            9,
            "the head is fed the pre-norm hidden",
            "mlx-lm#990",
            ANSWERS,
            "test_the_head_is_fed_the_normed_hidden",
        ),
        (
            10,
            "log-probabilities of accepted drafts are the head's",
            "mlx-lm#990",
            MODES,
            "test_log_probabilities_are_the_targets_at_every_k",
        ),
        (
            11,
            "processors do not see the prompt",
            "mlx-lm#990",
            ANSWERS,
            "test_processors_see_the_prompt",
        ),
        (
            12,
            "a token that was not emitted stays in the caches",
            "mlx-lm#990, exo#2110",
            ROUNDS,
            "test_a_token_that_was_not_emitted_leaves_the_caches",
        ),
        (
            13,
            "a sampled draft is accepted by argmax",
            "vllm-mlx#82",
            ROUNDS,
            "test_a_sampled_draft_is_accepted_by_its_probability",
        ),
        (
            14,
            "state of an earlier request is used again",
            "vllm-mlx#82",
            ANSWERS,
            "test_no_state_of_an_earlier_request_is_used_again",
        ),
        (
            15,
            "batch dimensions do not match",
            "vllm-mlx#82",
            ROUNDS,
            "test_hidden_embedding_and_cache_agree_in_rows",
        ),
        (
            16,
            "deferred drafts come out of order",
            "vllm-mlx#82",
            ANSWERS,
            "test_deferred_drafts_come_in_order",
        ),
        (
            17,
            "the config claims a head that was stripped",
            "everywhere",
            HEADS,
            "test_a_stripped_head_is_missing_whatever_the_config_claims",
        ),
        (
            18,
            "a cache published at a speculative boundary changes later answers",
            "vLLM#43559",
            ANSWERS,
            "test_a_b_a_gives_the_same_answer_twice",
        ),
        (
            19,
            "a partial set of experts is used",
            "everywhere",
            HEADS,
            "test_a_partial_set_of_experts_is_not_used",
        ),
        (
            20,
            "memory grows as blocks step over the count",
            "",
            ROUNDS,
            "test_memory_is_cleared_though_blocks_step_over_the_count",
        ),
        (
            21,
            "the argmax of logits is not that of rounded log-probabilities",
            "exo#2110",
            ROUNDS,
            "test_acceptance_and_replacement_use_the_same_argmax",
        ),
        (
            22,
            "norms are shifted twice or not at all",
            "mlx-lm#1442",
            ANSWERS,
            "test_norms_are_shifted_once",
        ),
        (
            23,
            "more is drafted than the budget has left",
            "exo#2110",
            ROUNDS,
            "test_no_more_is_drafted_than_the_budget_has_left",
        ),
        (
            24,
            "an answer is dropped inside a block",
            "exo#2110",
            ANSWERS,
            "test_an_answer_that_is_dropped_inside_a_block_leaves_nothing",
        ),
        (
            25,
            "the head is not primed with the prompt",
            "vllm-mlx#82",
            ANSWERS,
            "test_the_head_is_primed_with_the_prompt",
        ),
        (
            26,
            "the head belongs to a model of another size",
            "exo's forks",
            HEADS,
            "test_a_head_of_a_model_of_another_size_is_refused",
        ),
        (
            27,
            "two calls of a recurrent layer are mixed up",
            "",
            ROUNDS,
            "test_two_calls_of_a_recurrent_layer_are_kept_apart",
        ),
        (
            28,
            "a head that was off for a while drafts from a cache with a gap",
            "omlx",
            ROUNDS,
            "test_a_head_that_was_off_for_a_while_has_no_gap",
        ),
    )
)


@cache
def names_in(file: str) -> frozenset[str]:
    """The names of the tests that a file defines."""
    tree = ast.parse((TESTS / file).read_text())
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(node.name for node in tree.body if isinstance(node, kinds))


@pytest.mark.parametrize("pitfall", INDEX, ids=lambda pitfall: pitfall.fault)
def test_the_named_test_exists(pitfall: Pitfall) -> None:
    assert pitfall.test.startswith("test_")
    assert pitfall.test in names_in(pitfall.file)


def test_none_is_left_out() -> None:
    assert [pitfall.number for pitfall in INDEX] == list(range(1, len(INDEX) + 1))
    assert len(INDEX) >= 28
