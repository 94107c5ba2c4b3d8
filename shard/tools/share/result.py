"""The file of `exo-node report --share`, which anybody may read; free of MLX.

It has figures, facts of this list and nothing else: no host, user, path, address, key or text of a
model. Texts are of few characters, none of which is a slash, but in a published model's id.
"""

import re
import statistics
from collections.abc import Sequence
from typing import Annotated, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

SCHEMA: Final = 1
"""Raised with each field that is added; it then has a default, so that earlier files stay valid."""
_LONGEST: Final = 80
_UNUSUAL: Final = re.compile(r"[^A-Za-z0-9_ .,+()@-]")

Text = Annotated[str, Field(max_length=_LONGEST, pattern=r"^[A-Za-z0-9_ .,+()@?-]+$")]
Figure = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]
Sameness = Literal["bitwise", "near_tie", "off"]
PartName = Annotated[str, Field(max_length=_LONGEST, pattern=r"^[a-z_]+$")]


def plain_text(text: str) -> str:
    """A text of the system as the file may hold it: short, unusual characters replaced."""
    return _UNUSUAL.sub("?", text.strip())[:_LONGEST].strip() or "unknown"


class _Part(BaseModel):
    """A part of the file."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Machine(_Part):
    """The machine; `memory_gb` is what models can be in."""

    chip: Text
    backend: Literal["metal", "cuda", "cpu"]
    memory_gb: int | None = Field(ge=1, le=1 << 20)
    cores: int | None = Field(ge=1, le=1 << 16)
    system: Text = Field(description="such as macOS 15.5 or Linux 6.8")


class Versions(_Part):
    """Versions of the programs that decide bits and speed."""

    exo_node: Text
    mlx: Text
    mlx_lm: Text
    python: Text


class Model(_Part):
    """The model; its id only where this package has a card of it, for other names are a person's"""

    id: str | None = Field(max_length=200, pattern=r"^[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)?$")
    fingerprint: str | None = Field(
        pattern=r"^[0-9a-f]{64}$", description="hash of config.json and the tensors' headers"
    )
    weights: Literal["published", "random"] = "published"
    dtype: Literal["float32", "bfloat16", "float16"]
    bits: int | None = Field(ge=2, le=8, description="of quantised weights")
    layers: int = Field(ge=1, le=1 << 16)
    weight_gb: Figure | None
    max_k: int = Field(ge=0, le=64, description="most drafts a round; 0: it does not draft")


class SharedIdentity(_Part):
    """Whether drafts, copies and neighbours change an answer; null: not measured."""

    verdict: Literal["exact", "near_tie", "defect"] | None = Field(
        description="of `exo-node verify --quick`; null where not all of its checks were reached"
    )
    parts: dict[PartName, Literal["ok", "differs", "defect", "skipped"]] = Field(max_length=64)
    sets: dict[Text, Text] = Field(
        default={}, max_length=200, description="which rows and keys of a part agree, if measured"
    )
    greedy: Sameness | None
    batch: Sameness | None
    copies: bool | None = Field(description="whether prompt lookup is on")


class Spread(_Part):
    """Median, least and most over the repeats; a bench's page may have the median alone."""

    median: Figure
    least: Figure | None = None
    most: Figure | None = None

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """The spread of at least one value, to four digits."""
        median, least, most = (
            float(f"{each:.4g}") for each in (statistics.median(values), min(values), max(values))
        )
        return cls(median=median, least=least, most=most)


class SharedSpeed(_Part):
    """Greedy answers, one at a time. Drafts are the model's own head's, by adaptive K; of a bench's
    figures its page says how."""

    plain_tok_s: Spread | None
    drafted_tok_s: Spread | None
    ratio: Spread | None = Field(description="drafted over plain, within a repeat")
    accepted_share: float | None = Field(ge=0, le=1, description="of the drafts")
    first_token_s: Spread | None
    prompt_tokens: int | None = Field(ge=1, description="of the prompt of first_token_s")
    repeats: int = Field(ge=1)


class SharedResult(_Part):
    """Identity and speed of one model on one machine."""

    kind: Literal["exo-node result"] = "exo-node result"
    schema_version: int = Field(default=SCHEMA, ge=1, le=SCHEMA)
    date: str = Field(pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}$")
    machine: Machine
    versions: Versions
    model: Model
    identity: SharedIdentity
    speed: SharedSpeed
    source: str | None = Field(
        default=None,
        pattern=r"^bench/results/[a-z0-9-]+\.md$",
        description="the page of a bench that these figures are of; null: report --share",
    )

    def as_json(self) -> str:
        return self.model_dump_json(indent=2) + "\n"
