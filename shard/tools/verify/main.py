"""The child process of `exo-node verify`: reads one request, runs the checks, writes the report.

Started as `python -P -m exo_node.shard.tools.verify.main`. The report goes to stdout, notes to
stderr.
"""

import platform
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from pydantic import Field

from ....placement.errors import InvalidRequest, InvalidSettings
from ....proto import peer_pb2 as pb
from ..child import ModelRequest, compile_apart, model_facts, note, package_version, run_child
from .report import Check, Report, as_json, as_text

if TYPE_CHECKING:
    from ...model.load import Loaded
    from ...text.codec import TextCodec
    from .subject import ModelUnderTest

STDOUT: Final = "-"
_PROMPTS: Final = (
    "Write a short story about a lighthouse keeper who finds a message in a bottle that was "
    "written by herself.",
    "List fifteen rivers of the world, each with the continent it is on and the sea or ocean it "
    "flows into, as a numbered list.",
)

Note = Callable[[str], None]


class VerifyRequest(ModelRequest):
    """The command's request.

    `k`: 0 for the card's max_k. `json_file`: "" for no JSON, "-" for JSON alone on stdout.
    """

    k: Annotated[int, Field(ge=0, le=8)]
    quick: bool
    json_file: str
    quantization: Annotated[int, Field(ge=2, le=8)] | None


@dataclass(frozen=True, slots=True)
class Effort:
    """Amounts of work: prompts and tokens of answers, rows of single steps, samples of a round."""

    prompts: int
    tokens: int
    rows: int
    samples: int


QUICK: Final = Effort(prompts=1, tokens=24, rows=14, samples=200)
FULL: Final = Effort(prompts=2, tokens=32, rows=24, samples=400)


def run_verify(request: VerifyRequest, spec: pb.StageSpec, note: Note) -> Report:
    """Loads the model like a runner and checks it. Raises the errors of loading."""
    start = time.perf_counter()
    loaded = load_whole(spec, note)
    effort = QUICK if request.quick else FULL
    subject, prompts, source = subject_and_prompts(loaded, spec, request.k, effort)
    checks = tuple(run_checks(subject, prompts, effort, note))
    return Report(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        versions=versions(),
        device=_device(request),
        model=model_facts(spec, loaded)
        | {
            "quantization": request.quantization,
            "kv_bits": spec.kv_bits or None,
            "vocabulary": loaded.expected.vocabulary,
        },
        settings={"max_k": subject.max_k, "prompts_from": source, **asdict(effort)},
        kernels=loaded.kernels,
        checks=checks,
        seconds=time.perf_counter() - start,
    )


def load_whole(spec: pb.StageSpec, note: Note) -> "Loaded":
    """Loads a whole model like a runner. Raises the errors of loading."""
    # These imports take seconds; a faulty request is reported before them.
    from ...model import loader_import  # noqa: F401  # pyright: ignore[reportUnusedImport]

    # `loader_import` has to come before mlx-lm, which mtp imports.
    # isort: split
    from ...kernels.kernel_choice import COMPILING
    from ...model.load import load

    note(f"loading {spec.model}")
    return load(spec, lambda news: note(news.step) if news.step == COMPILING else None)


def subject_and_prompts(
    loaded: "Loaded", spec: pb.StageSpec, k: int, effort: Effort
) -> tuple["ModelUnderTest", list[list[int]], str]:
    """A loaded model as the checks take it, its prompts, and where they come from.

    `k`: the most drafts a round; 0 for as many as the model drafts on this machine.
    """
    from ....mtp.pieces import result_of
    from ....mtp.probe import exact_depth
    from ...model.tensors import DTYPES
    from .subject import subject_of

    drafts = spec.max_draft_tokens if loaded.head is not None else 0
    most = min(k, drafts) if k and drafts else drafts
    assert loaded.codec is not None
    prompts, source = _prompts(loaded.codec, loaded.expected.vocabulary, effort.prompts)
    subject = subject_of(loaded, DTYPES[spec.dtype], spec.prefill_chunk, most)
    if drafts and not k and not subject.no_rollback:
        depth = result_of(exact_depth(subject.probed(spec.context_length), most))
        subject = replace(subject, max_k=depth or most)
    return subject, prompts, source


def run_checks(
    subject: "ModelUnderTest", prompts: Sequence[Sequence[int]], effort: Effort, note: Note
) -> Iterator[Check]:
    """Runs every check, the cheap and sensitive ones first."""
    from . import answers, numbers

    if subject.no_rollback:
        yield Check("blocks", "skipped", f"{subject.no_rollback}: it never drafts", {})
        return
    note("checking blocks of rows")
    rows = max(effort.rows, numbers.rows_for_rollback(subject.max_k))
    plain = answers.ids_of(answers.answer(subject, prompts[0], 0, rows))
    chain = numbers.chain_of(subject, prompts[0], plain)
    blocks, differences = numbers.check_blocks(subject, chain)
    yield blocks
    note("checking rollback")
    yield numbers.check_rollback(subject, chain)
    exact, tokens = blocks.finding == "ok", effort.tokens
    largest = max(differences, key=lambda each: each.tau)
    for kind, drafting in subject.by_drafter.items():
        by = f" by {kind}" if kind else ""
        note(f"checking answers{by}")
        yield answers.check_greedy(drafting, prompts, tokens, largest.tau, bitwise=exact).named(by)
        yield answers.check_batch(drafting, chain, prompts, tokens, largest).named(by)
        yield answers.check_seeded(drafting, prompts, tokens // 2, bitwise=exact).named(by)
        note(f"checking what sampling draws{by}")
        yield answers.check_marginals(drafting, chain, effort.samples).named(by)


def _prompts(codec: "TextCodec", vocabulary: int, count: int) -> tuple[list[list[int]], str]:
    """The bundled prompts, at most `count`; arbitrary ids if the model has no chat template."""
    chats = [[{"role": "user", "content": text}] for text in _PROMPTS[:count]]
    try:
        return [codec.encode_chat(chat) for chat in chats], "bundled"
    except InvalidRequest:
        return [[(7 * i + n) % vocabulary for i in range(40)] for n in range(count)], "arbitrary"


def _device(request: VerifyRequest) -> dict[str, Any]:
    import mlx.core as mx

    return {
        "chip": request.chip,
        "backend": request.backend,
        "memory_bytes": request.memory_bytes,
        "mlx_device": mx.default_device().type.name,
        "os": system_name(),
    }


def system_name() -> str:
    """The system, such as `macOS 15.1` or `Linux 6.8.0`, without additions to a kernel's name."""
    if sys.platform == "darwin":
        return f"macOS {platform.mac_ver()[0]}"
    number = re.match(r"[0-9]+(\.[0-9]+)*", platform.release())
    return f"{platform.system()} {number[0] if number else ''}".strip()


def versions() -> dict[str, str]:
    names = ("exo-node", "mlx", "mlx-lm", "transformers")
    packages = {name.replace("-", "_"): package_version(name) for name in names}
    return {**packages, "python": platform.python_version()}


def write_report(report: Report, json_file: str) -> None:
    """Writes the report. Raises InvalidSettings if the file cannot be written."""
    if json_file == STDOUT:
        print(as_json(report), end="", flush=True)
        return
    print(as_text(report), flush=True)
    if not json_file:
        return
    try:
        _ = Path(json_file).write_text(as_json(report))
    except OSError as error:
        raise InvalidSettings(
            f"--report {json_file}: cannot be written ({error.strerror}); name another file",
            param="--report",
        ) from error


def _run(request: VerifyRequest) -> int:
    with compile_apart():
        report = run_verify(request, request.spec, note)
    write_report(report, request.json_file)
    return report.exit_status


if __name__ == "__main__":
    run_child("verify", VerifyRequest, _run)
