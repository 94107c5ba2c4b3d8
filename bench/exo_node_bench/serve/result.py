"""The result of a bench as its JSON file has it. It contains no name, address, path or prompt."""

from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, Field

KIND: Final = "exo-node bench serve"
SCHEMA: Final = 1
State = Literal["running", "complete", "limit", "interrupted"]


class _Part(BaseModel):
    """A part of the file."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ClientMachine(_Part):
    """The machine and installation that ran the bench."""

    chip: str
    memory_gb: int = Field(description="the usual size that the machine is sold with")
    cores: int
    system: str = Field(description="such as Linux 6.8 x86_64")
    versions: dict[str, str] = Field(description="of exo-node, mlx, mlx-lm and Python")


class StageNode(_Part):
    """A node that holds layers of the model; it has no name here."""

    chip: str
    backend: str | None = Field(description="metal, cuda or cpu; null where unknown")
    models_gb: float | None = Field(description="the memory that models may take, in GB")
    layers: int | None


class Model(_Part):
    """The model that answered; fields that the server does not send are null."""

    id: str = Field(description="the last part, where the server gives a path")
    quantization_bits: int | None = None
    format: str | None = Field(default=None, description="the precision of the files")
    dtype: str | None = Field(default=None, description="the precision of the computation")
    context_length: int | None = None
    parameters: int | None = None


class DraftingUse(_Part):
    """How answers were drafted, by their own statistics."""

    drafter_kind: str
    draft_policy: str | None
    num_draft_tokens: int | None = Field(description="K, the most drafts of a round")
    answers: int


class ServerFacts(_Part):
    """A server under test."""

    name: str = Field(description="the NAME of --server")
    software: str | None = Field(description="such as exo-node 0.1.0; null for other servers")
    same_machine: bool = Field(description="whether it was reached over loopback")
    model: Model
    nodes: tuple[StageNode, ...] = Field(description="the placement, in the order of layers")
    replicas: int | None = None
    drafting: tuple[DraftingUse, ...] = Field(description="the most frequent first")


class WorkloadFacts(_Part):
    """One kind of request."""

    name: str
    prompt_tokens: int = Field(description="of an agent's system prompt; 0 of questions")
    questions: int = Field(description="how many there are; 0 of other workloads")
    turns: int
    tool_tokens: int = Field(description="of a tool's result in a conversation")


class BenchSettings(_Part):
    """The settings of a bench."""

    workloads: tuple[WorkloadFacts, ...]
    concurrency: tuple[int, ...]
    requests: int
    repeats: int
    output_tokens: int
    limit_s: float | None
    silence_s: float
    temperature: float
    seed: int
    prompt_tokens_by: Literal["usage", "assumed"] = Field(
        description="how prompts got their length: by the server's counts, or a word a token"
    )
    extra_fields: dict[str, int | float | bool | None] = Field(
        description="fields of --extra-body; values other than numbers are null"
    )


class AnswerTimes(_Part):
    """One request. Times are seconds since it began."""

    turn: int
    events_s: tuple[float, ...] = Field(description="the events with text")
    end_s: float
    prompt_tokens: int | None
    cached_tokens: int | None
    output_tokens: int | None
    finish_reason: str | None = Field(description="stop, length, tool_calls or other")
    failure: str | None = Field(description="the kind of failure, without the server's words")


class RunResult(_Part):
    """One server at one workload and number of clients, once."""

    server: str
    workload: str
    max_concurrency: int
    repeat: int
    output_tokens_by: str = Field(description="usage, events or both")
    figures: dict[str, int | float | None] = Field(description="docs/benchmarks.md explains each")
    failures: dict[str, int] = Field(description="failed requests by kind")
    answers: tuple[AnswerTimes, ...]


class RatioResult(_Part):
    """The first server's figure over another's: the median of the ratios within a repeat."""

    other: str
    workload: str
    max_concurrency: int
    figure: str
    median: float
    least: float
    most: float


class SameAnswers(_Part):
    """How many questions both servers answered, and how many with the same text."""

    other: str
    both: int
    same: int


class Result(_Part):
    """The file `serve.json` of `exo-node bench serve`."""

    kind: Literal["exo-node bench serve"] = KIND
    schema_version: Literal[1] = SCHEMA
    date: str
    state: State = Field(description="limit: --limit ended it before the last repeat")
    runs_planned: int
    client: ClientMachine
    settings: BenchSettings
    servers: tuple[ServerFacts, ...]
    runs: tuple[RunResult, ...]
    ratios: tuple[RatioResult, ...] = Field(description="empty with one server")
    same_answers: tuple[SameAnswers, ...]
