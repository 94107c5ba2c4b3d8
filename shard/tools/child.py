"""The child process of a command: one request, its run, and an end with the command."""

import os
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Annotated, Final, Literal, NoReturn, TypeVar

from google.protobuf.message import DecodeError
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from ...placement.errors import ExoNodeError, InvalidSettings
from ...proto import peer_pb2 as pb

if TYPE_CHECKING:
    from ..model.load import Loaded

MAX_REQUEST_BYTES: Final = 1 << 20

Text = Annotated[str, Field(max_length=4096)]


class ChildRequest(BaseModel):
    """The request of a command: one line of JSON."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


class ModelRequest(ChildRequest):
    """A request about one whole model on this machine. `stage`: a StageSpec in hexadecimal."""

    stage: str = Field(pattern=r"^([0-9a-f]{2})+$", max_length=65536)
    chip: Text
    backend: Literal["metal", "cuda", "cpu"]
    memory_bytes: int = Field(ge=0)

    @field_validator("stage")
    @classmethod
    def _is_spec(cls, stage: str) -> str:
        try:
            _ = spec_of(stage)
        except DecodeError as error:
            raise ValueError("no StageSpec") from error
        return stage

    @property
    def spec(self) -> pb.StageSpec:
        return spec_of(self.stage)


def spec_of(stage: str) -> pb.StageSpec:
    """The StageSpec in a request. Raises DecodeError."""
    return pb.StageSpec.FromString(bytes.fromhex(stage))


RequestT = TypeVar("RequestT", bound=ChildRequest)


def parse_request(command: str, kind: type[RequestT], line: bytes) -> RequestT:
    """Parses a request. Raises InvalidSettings, which names the field."""
    try:
        return kind.model_validate_json(line)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(map(str, first["loc"][:1]))
        raise InvalidSettings(
            f"the request of `exo-node {command}` is malformed ({field or 'all of it'}: "
            f"{first['msg']}); install one version of exo-node",
            param=field or None,
        ) from error


def run_child(command: str, kind: type[RequestT], run: Callable[[RequestT], int]) -> NoReturn:
    """Runs the process: the first line of stdin is its request, and it ends with stdin.

    The exit status is that of `run`; 2 for a request or a setting that is wrong, else 1 for an
    error, which is one line on stderr.
    """
    line = sys.stdin.buffer.readline(MAX_REQUEST_BYTES)
    try:
        request = parse_request(command, kind, line)
        # Only now: the steps before take no time, and their error must reach the command.
        threading.Thread(target=_end_with_stdin, name="parent", daemon=True).start()
        status = run(request)
    except ExoNodeError as error:
        note(f"exo-node: {error.message}")
        status = 2 if isinstance(error, InvalidSettings) else 1
    except OSError as error:
        note(f"exo-node: {error}; check the disk and its permissions, and try again")
        status = 1
    sys.stdout.flush()
    # Not by sys.exit, which would abort: MLX's threads still run.
    os._exit(status)


def _end_with_stdin() -> NoReturn:
    while os.read(0, 65536):
        pass
    os._exit(1)


def note(text: str) -> None:
    """Prints a line to stderr: stdout is for results."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def compile_apart() -> Generator[None]:
    """Compiles as a runner does, and keeps what was compiled if no error ends the work.

    Imported late: that takes seconds, and a faulty request is reported before it.
    """
    from ..model import loader_import  # noqa: F401  # pyright: ignore[reportUnusedImport]

    # isort: split
    from ..kernels.fused_code import compiling_apart

    with compiling_apart() as keep_compiled:
        yield
        keep_compiled()


def model_facts(spec: pb.StageSpec, loaded: "Loaded") -> dict[str, object]:
    """Facts about a loaded model for a report."""
    return {
        "id": spec.model,
        "fingerprint": loaded.fingerprint,
        "dtype": spec.dtype,
        "layers": spec.num_layers,
        "weight_bytes": loaded.weight_bytes,
        "head_bytes": loaded.head_bytes,
        "head": loaded.head_state,
    }


def package_version(name: str) -> str:
    """A package's version; one on PYTHONPATH may lack its installer's metadata."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
