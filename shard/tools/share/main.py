"""The child process of `exo-node report --share`: one model measured, the result on stdout.

Started as `python -P -m exo_node.shard.tools.share.main`. Notes go to stderr.
"""

import os
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Final, cast

from pydantic import Field

from ....proto import peer_pb2 as pb
from ..child import ModelRequest, compile_apart, note, run_child
from ..verify import main as verify
from ..verify.report import Check, verdict_of
from .result import Machine, Model, SharedIdentity, SharedResult, SharedSpeed, Versions, plain_text

if TYPE_CHECKING:
    from ...engine.answers.text_engine import TextEngine
    from ...model.load import Loaded

SPEED_SHARE: Final = 0.3
"""The share of the time after which no repeat begins; the rest is for the checks."""
CHECKS_SHARE: Final = 0.7


class ShareRequest(ModelRequest):
    """The command's request. `published_id`: the model's id if this package has a card of it."""

    published_id: str | None = Field(max_length=200)
    quantization: Annotated[int, Field(ge=2, le=8)] | None
    initial_k: int = Field(ge=0, le=64)
    limit_s: float = Field(gt=0)


def run_share(request: ShareRequest, spec: pb.StageSpec) -> SharedResult:
    """Loads, times and checks the model. Raises the errors of loading."""
    started_at = time.perf_counter()
    loaded = verify.load_whole(spec, note)

    from .speeds import measure_speeds, measured_engine

    subject, prompts, _ = verify.subject_and_prompts(loaded, spec, 0, verify.QUICK)
    note("measuring this machine")
    engine = measured_engine(loaded, spec)
    speed = measure_speeds(
        engine, prompts, request.initial_k, started_at + SPEED_SHARE * request.limit_s, note
    )
    checks, whole = list[Check](), True
    for check in verify.run_checks(subject, prompts, verify.QUICK, note):
        checks.append(check)
        whole = time.perf_counter() - started_at < CHECKS_SHARE * request.limit_s
        if not whole:
            note("the other checks are left out: this model takes too long for them")
            break
    return result_of(request, loaded, spec, engine, speed, checks, whole=whole)


def result_of(
    request: ShareRequest,
    loaded: "Loaded",
    spec: pb.StageSpec,
    engine: "TextEngine",
    speed: SharedSpeed,
    checks: Sequence[Check],
    *,
    whole: bool,
) -> SharedResult:
    """The part of all this that may be published. `whole`: whether all checks were reached."""
    from ...kernels import own_keys, row_groups

    packages = {name: plain_text(text) for name, text in verify.versions().items()}
    measured = engine.measurements
    return SharedResult(
        date=f"{datetime.now(UTC):%Y-%m-%d}",
        machine=Machine(
            chip=plain_text(request.chip),
            backend=request.backend,
            memory_gb=round(request.memory_bytes / 2**30) or None,
            cores=os.cpu_count(),
            system=plain_text(verify.system_name()),
        ),
        versions=Versions(
            **{name: packages[name].partition("+")[0] for name in Versions.model_fields}
        ),
        model=Model(
            id=request.published_id,
            fingerprint=loaded.fingerprint or None,
            dtype=cast("Any", spec.dtype),
            bits=request.quantization,
            layers=spec.num_layers,
            weight_gb=float(f"{loaded.weight_bytes / 1e9:.3g}") or None,
            max_k=engine.drafting.max_k,
        ),
        identity=SharedIdentity(
            verdict=verdict_of(checks) if whole else None,
            parts={check.name: check.finding for check in checks},
            sets={
                plain_text(each.shape): plain_text(each.reason)
                for each in loaded.kernels
                if each.kernel in (row_groups.NAME, row_groups.SINGLE, own_keys.NAME)
            },
            greedy=cast("Any", measured.identity),
            batch=cast("Any", measured.batch_identity),
            copies=not engine.lookup.off_reason,
        ),
        speed=speed,
    )


def _run(request: ShareRequest) -> int:
    with compile_apart():
        result = run_share(request, request.spec)
    print(result.as_json(), end="", flush=True)
    return 0


if __name__ == "__main__":
    run_child("report --share", ShareRequest, _run)
