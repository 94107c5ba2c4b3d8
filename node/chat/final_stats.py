"""The final stats of an answer, from the generator's message to the API's `generation_stats`."""

from typing import Any

from ...proto import peer_pb2 as pb


def stats_to_json(stats: pb.Stats) -> dict[str, Any]:
    """The object of the API, but for what only the entry node knows; see `docs/mtp.md`."""
    rate = stats.acceptance_rate if stats.HasField("acceptance_rate") else None
    share = stats.accepted_share_of_output if stats.HasField("accepted_share_of_output") else None
    return {
        "drafter_kind": stats.drafter_kind,
        "num_draft_tokens": stats.num_draft_tokens,
        "drafting_reason": stats.drafting_reason,
        "acceptance_rule": stats.acceptance_rule,
        "prompt_tokens": stats.prompt_tokens,
        "completion_tokens": stats.completion_tokens,
        "spec_decode_rounds": stats.spec_decode_rounds,
        "proposed_draft_tokens": stats.proposed_draft_tokens,
        "accepted_draft_tokens": stats.accepted_draft_tokens,
        "accepted_per_position": list(stats.accepted_per_position),
        "acceptance_rate": rate,
        "accepted_share_of_output": share,
        "draft_policy": stats.draft_policy,
        "draft_k_histogram": list(stats.draft_k_histogram),
        "draft_k_trace": [[run.k, run.rounds] for run in stats.draft_k_trace],
        "head_parked": stats.head_parked,
        "prompt_tps": stats.prompt_tps,
        "generation_tps": stats.generation_tps,
        "time_to_first_token_s": stats.time_to_first_token_s,
        "peak_memory_bytes": stats.peak_memory_bytes,
        "resumes": stats.resumes,
        "resume_exact": stats.resume_exact,
        "kernels": list(stats.kernels),
        "cached_tokens": stats.cached_tokens,
        "batched_tokens": stats.batched_tokens,
        "batch_size": stats.batch_size,
        "batching_reason": stats.batching_reason,
        "greedy_identity": stats.greedy_identity,
        "batch_identity": stats.batch_identity,
        "kv_bits": stats.kv_bits or None,
        "dtype": stats.dtype,
        "dtype_reason": stats.dtype_reason,
    }
