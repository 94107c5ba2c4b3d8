"""The request to the process that runs `exo-node bench mtp`; free of MLX."""

from typing import Annotated, Literal

from google.protobuf.message import DecodeError
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ....placement.card import MAX_K
from ....placement.errors import InvalidSettings
from ....proto import peer_pb2 as pb

_Text = Annotated[str, Field(max_length=4096)]
_Depth = Annotated[int, Field(ge=1, le=MAX_K)]


class BenchRequest(BaseModel):
    """One sweep. `depths` lists the fixed K > 0; K = 0 always runs, as the reference.

    `stage` is the StageSpec of the whole model in hexadecimal; `prompts` None: the bundled ones.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    stage: str = Field(pattern=r"^([0-9a-f]{2})+$", max_length=65536)
    depths: tuple[_Depth, ...]
    adaptive: bool
    initial_k: int = Field(default=0, ge=0, le=MAX_K)
    """Drafts a round that adaptive K begins with; 0 where the head drafts nothing."""
    lookup: bool = False
    """Whether arms with copied drafts run as well."""
    against_mlx_lm: bool
    prompts: _Text | None
    max_tokens: int = Field(ge=2)
    repeats: int = Field(ge=1)
    temperature: float = Field(ge=0, le=2)
    output: _Text
    chip: _Text
    backend: Literal["metal", "cuda", "cpu"]
    memory_bytes: int = Field(ge=0)


def parse_bench_request(line: bytes) -> tuple[BenchRequest, pb.StageSpec]:
    """Parses and checks a request. Raises InvalidSettings, which names the field."""
    try:
        request = BenchRequest.model_validate_json(line)
        spec = pb.StageSpec.FromString(bytes.fromhex(request.stage))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise _fault(".".join(map(str, first["loc"])) or "the request", first["msg"]) from None
    except DecodeError as error:
        raise _fault("stage", "is no StageSpec") from error
    limit = spec.max_draft_tokens if spec.native_mtp else 0
    if any(k > limit for k in request.depths):
        raise _fault("depths", f"holds a K above {limit}, the most that {spec.model} drafts")
    if request.initial_k > limit:
        raise _fault("initial_k", f"is above {limit}, the most that {spec.model} drafts")
    return request, spec


def _fault(field: str, what: str) -> InvalidSettings:
    return InvalidSettings(f"a request to this process: {field}: {what}", param=field)
