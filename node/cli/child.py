"""The child process of a command that runs a model by itself; it never outlives the command."""

import contextlib
import subprocess
import sys
import threading
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ...placement.errors import InvalidSettings, LoadFailed
from .times import TIMES

if TYPE_CHECKING:
    from ..placements.local_model import LocalModel


def local_model(
    name: str, dtype: str | None, models_dir: list[str] | None
) -> "tuple[LocalModel, Mapping[str, str]]":
    """The model `name`, and the environment of the child that loads it.

    Raises InvalidSettings, ModelNotFound and what else `resolve` raises.
    """
    from ..machine import settings
    from ..placements.local_model import resolve

    environ = settings.environment()
    flags = {"dtype": dtype, "models_dirs": models_dir or None}
    loaded = settings.load_settings(flags, environ)
    distributions = settings.installed_distributions()
    settings.check_mlx_extras(distributions)
    model = resolve(name, loaded, distributions)
    if model.card.embeds:
        raise InvalidSettings(
            f"{model.card.id} is an embedder, which generates nothing to check or to time; name a "
            "model that answers",
            param="MODEL",
        )
    return model, settings.runner_environment(environ)


def model_facts(model: "LocalModel") -> dict[str, object]:
    """The fields that the requests of all children share."""
    return {
        "stage": model.spec.SerializeToString().hex(),
        "chip": model.hardware.chip,
        "backend": model.hardware.backend,
        "memory_bytes": model.hardware.total_bytes,
    }


def absolute(path: str) -> str:
    """A path that means the same in a child; `~` is expanded."""
    return str(Path(path).expanduser().absolute())


def depth_error(k: int, model: "LocalModel", most: int) -> InvalidSettings:
    """The error for more drafts a round than the model's card allows."""
    return InvalidSettings(
        f"--k: {k}, and {model.card.id} drafts at most {most} tokens a round; ask for less, or "
        "raise max_k in the exo-card.toml of its folder",
        param="--k",
    )


@contextlib.contextmanager
def child_process(
    module: str,
    request: str,
    environment: Mapping[str, str],
    stdout: int | None = None,
) -> "Generator[subprocess.Popen[bytes]]":
    """`python -m module` with `request` as the first line of its stdin, until the block ends.

    Its stdin ends with this process. Where the block is interrupted the child is ended first.
    `stdout`: subprocess.PIPE, or None for this process's own.
    """
    with subprocess.Popen(
        (sys.executable, "-P", "-m", module),
        stdin=subprocess.PIPE,
        stdout=stdout,
        env=dict(environment),
        start_new_session=True,  # Ctrl-C reaches this process alone, which then ends the child
    ) as child:
        assert child.stdin is not None
        try:
            with contextlib.suppress(BrokenPipeError):  # it ended early: its status says how
                _ = child.stdin.write(request.encode() + b"\n")
                child.stdin.flush()
            yield child
        except BaseException:  # Ctrl-C above all: the child must not outlive its command
            _end(child)
            raise
        finally:
            with contextlib.suppress(BrokenPipeError):
                child.stdin.close()


def run_child(module: str, request: str, environment: Mapping[str, str]) -> int:
    """The exit status of a child that prints its own output. Raises LoadFailed for a signal."""
    with child_process(module, request, environment) as child:
        status = child.wait()
    return _unless_killed(status)


def read_child(
    module: str,
    request: str,
    environment: Mapping[str, str],
    limit_s: float = threading.TIMEOUT_MAX,
) -> tuple[int, bytes]:
    """The exit status and the stdout of a child, which prints its own notes and errors to stderr.

    Raises LoadFailed for a signal, and for a child that `limit_s` was too short for.
    """
    with child_process(module, request, environment, subprocess.PIPE) as child:
        assert child.stdout is not None
        expired = threading.Event()
        limit = threading.Timer(limit_s, lambda: (expired.set(), child.kill()))
        limit.start()
        try:
            output = child.stdout.read()
            status = child.wait()
        finally:
            limit.cancel()
    if expired.is_set() and status:
        raise LoadFailed(
            f"it was not done after {limit_s:.0f} s and was ended; close other programs, or name a "
            "smaller model"
        )
    return _unless_killed(status), output


def _unless_killed(status: int) -> int:
    """The exit status. Raises LoadFailed for a signal."""
    if status < 0:
        raise LoadFailed(
            f"the process that ran the model was ended by signal {-status}; if memory ran out, "
            "close other programs or choose a smaller quantisation"
        )
    return status


def _end(child: "subprocess.Popen[bytes]") -> None:
    child.terminate()
    try:
        _ = child.wait(TIMES.child_end_s)
    except subprocess.TimeoutExpired:
        child.kill()
        _ = child.wait()
