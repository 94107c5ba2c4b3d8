"""The request to the process that runs `exo-node bench mtp`; free of MLX."""

from typing import Annotated, Final

from pydantic import Field, ValidationInfo, field_validator

from exo_node.placement.card import MAX_K
from exo_node.shard.tools.child import ModelRequest, Text, spec_of

JSON_FILE: Final = "mtp.json"
"""The file of the results, in the folder that the request names."""
_Depth = Annotated[int, Field(ge=1, le=MAX_K)]


class BenchRequest(ModelRequest):
    """One sweep. `depths` lists the fixed K > 0; K = 0 always runs, as the reference.

    `prompts` None: the bundled ones.
    """

    depths: tuple[_Depth, ...]
    adaptive: bool
    initial_k: int = Field(default=0, ge=0, le=MAX_K)
    """Drafts a round that adaptive K begins with; 0 where the head drafts nothing."""
    lookup: bool = False
    """Whether arms with copied drafts run as well."""
    against_mlx_lm: bool
    prompts: Text | None
    max_tokens: int = Field(ge=2)
    repeats: int = Field(ge=1)
    temperature: float = Field(ge=0, le=2)
    output: Text

    @field_validator("depths", "initial_k")
    @classmethod
    def _is_drafted(cls, value: tuple[int, ...] | int, info: ValidationInfo) -> object:
        if "stage" in info.data:  # else that is the error
            spec = spec_of(info.data["stage"])
            most = spec.max_draft_tokens if spec.native_mtp else 0
            if any(k > most for k in (value if isinstance(value, tuple) else (value,))):
                raise ValueError(f"{value} is above {most}, the most that {spec.model} drafts")
        return value
