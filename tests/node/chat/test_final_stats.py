"""Final stats on their way from the engine to the API: no field is lost, none changes."""

import json
from dataclasses import MISSING, asdict, fields, replace

from exo_node.mtp.types import GenerationStats
from exo_node.node.chat.wire import stats_to_json
from exo_node.shard.model.stage_limits import StageLimits
from exo_node.shard.runner.generator_wire import shared_stats, stats_to_wire

FULL = GenerationStats(
    drafter_kind="native_mtp",
    num_draft_tokens=3,
    drafting_reason="why",
    acceptance_rule="block",
    prompt_tokens=11,
    completion_tokens=12,
    spec_decode_rounds=13,
    proposed_draft_tokens=14,
    accepted_draft_tokens=15,
    accepted_per_position=(3, 1),
    acceptance_rate=0.1,
    accepted_share_of_output=0.3,
    draft_policy="adaptive",
    draft_k_histogram=(1, 0, 3),
    draft_k_trace=((2, 1), (0, 4)),
    head_parked=True,
    depth_reason="K = 2 of at most 3",
    prompt_tps=1 / 3,
    generation_tps=2 / 3,
    time_to_first_token_s=0.7,
    peak_memory_bytes=2**40,
    resumes=2,
    resume_exact=False,
    kernels=("row_attention",),
    cached_tokens=16,
    batched_tokens=17,
    batch_size=2.5,
    batching_reason="alone",
    cached_tier="disk",
    lookup_rounds=5,
    lookup_proposed_tokens=19,
    lookup_accepted_tokens=18,
    lookup_reason="why not",
    loop_reason="a loop of 12",
    read_by=("mini", "studio"),
    read_s=1.5,
    read_bytes=2**33,
    read_reason="with mini",
)


def test_every_field_reaches_the_api_as_it_was() -> None:
    same = [f.name for f in fields(FULL) if getattr(FULL, f.name) == f.default is not MISSING]
    assert same == [], "a field that has its default shows nothing"
    wire = stats_to_wire(FULL, "bitwise", "near_tie")
    limits = StageLimits("p", 1, "float16", 8, 8, 8, 8, kv_bits=8, dtype_reason="a reason")
    wire.MergeFrom(shared_stats(limits))
    shared = {"greedy_identity": "bitwise", "batch_identity": "near_tie"}
    shared |= {"kv_bits": 8, "dtype": "float16", "dtype_reason": "a reason"}
    assert stats_to_json(wire) == {**json.loads(json.dumps(asdict(FULL))), **shared}


def test_what_there_is_none_of_is_null() -> None:
    bare = replace(FULL, acceptance_rate=None, accepted_share_of_output=None)
    stats = stats_to_json(stats_to_wire(bare, "off"))
    names = ("acceptance_rate", "accepted_share_of_output", "kv_bits")
    assert [stats[name] for name in names] == [None] * 3
    zero = stats_to_json(stats_to_wire(replace(FULL, acceptance_rate=0.0), "off"))
    assert zero["acceptance_rate"] == 0.0
