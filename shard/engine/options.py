"""EngineOptions: what a stage's specification says of its engine."""

from dataclasses import dataclass

from ...proto import peer_pb2 as pb


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How a `TextEngine` computes; the same for each of its requests."""

    dtype: str
    context_length: int
    prefill_chunk: int = 512
    """Rows of a prompt in one forward."""
    async_draft_eval: bool = True
    max_draft_tokens: int = 0
    """The largest K that a request may ask for; without a draft head it is 0."""
    fixed_rows: int = 0
    """Strict mode: the rows of every decode forward. 0: as many as there are."""
    draft_vocabulary: int = 0
    """Only ids below it are drafted. 0: all."""
    prefix_cache_bytes: int = 0
    """For prompts that were read and requests in progress together. 0: nothing is kept."""
    batching: bool = True
    """Requests that are decoded at the same time share their forwards."""
    stages: int = 1

    @classmethod
    def of(cls, spec: pb.StageSpec) -> "EngineOptions":
        return cls(
            spec.dtype,
            spec.context_length,
            spec.prefill_chunk,
            spec.async_draft_eval,
            spec.max_draft_tokens,
            spec.fixed_rows,
            spec.draft_vocabulary,
            spec.prefix_cache_bytes,
            spec.batching,
            spec.num_stages,
        )
