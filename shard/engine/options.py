"""EngineOptions: the part of a stage's specification that concerns its engine."""

from dataclasses import dataclass, fields

from ...proto import peer_pb2 as pb


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How a `TextEngine` computes all of its requests."""

    dtype: str
    context_length: int
    prefill_chunk: int = 512
    """Rows of a prompt in one forward."""
    keeps_chunk: bool = True
    """Whether a forward that finds no memory ends its answer: else the process ends, and the next
    one reads prompts in shorter chunks."""
    async_draft_eval: bool = True
    max_draft_tokens: int = 0
    """The largest K that a request may ask for; ignored without a draft head."""
    draft_vocabulary: int = 0
    """Only ids below it are drafted, or all if it is 0."""
    prefix_cache_bytes: int = 0
    """Budget of the prefix cache and the requests in progress together; no prefixes if it is 0."""
    batching: bool = True
    """Whether requests that are decoded at the same time share forwards."""
    num_stages: int = 1
    """Stages of the placement."""
    prompt_lookup: bool = False
    """Whether requests may copy drafts from their own tokens."""
    lookup_off_reason: str = ""
    """Why they may not."""
    reads_any: bool = False
    """Whether other kinds of machines may read prompts, so that cached states may be theirs."""
    pooling: str = ""
    """How an embedder's hidden states become an embedding. Empty for a model that answers."""

    @classmethod
    def of(cls, spec: pb.StageSpec) -> "EngineOptions":
        return cls(**{each.name: getattr(spec, each.name) for each in fields(cls)})
