"""The file of `exo-node report --share`: what it may contain, and that later versions read it."""

import json
import platform
import runpy
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from exo_node.node.cli.report import published_id
from exo_node.placement.errors import InvalidSettings, LoadFailed
from exo_node.proto import peer_pb2 as pb
from exo_node.shard.kernels.trial import KernelChoice
from exo_node.shard.tools.share.main import ShareRequest, result_of
from exo_node.shard.tools.share.result import (
    Machine,
    Model,
    SharedIdentity,
    SharedResult,
    SharedSpeed,
    Spread,
    Versions,
    plain_text,
)
from exo_node.shard.tools.share.speeds import TimedAnswer, rate
from exo_node.shard.tools.verify.report import Check

DOCS = Path(__file__).parents[4] / "docs"
GENERATOR: Mapping[str, Any] = runpy.run_path(str(DOCS / "generate.py"))
read_result: Callable[[bytes, str], SharedResult] = GENERATOR["read_result"]
FIRST_VERSION = b"""{"kind": "exo-node result", "schema_version": 1, "date": "2026-11-29",
"machine": {"chip": "Apple M9", "backend": "metal", "memory_gb": 64, "cores": 12,
"system": "macOS 15.5"}, "versions": {"exo_node": "0.1.0", "mlx": "0.32.4", "mlx_lm": "0.32.2",
"python": "3.13.1"}, "model": {"id": null, "fingerprint": null, "weights": "published",
"dtype": "bfloat16", "bits": 4, "layers": 64, "weight_gb": 15.1, "max_k": 3}, "identity":
{"verdict": "near_tie", "parts": {"blocks": "differs"}, "greedy": "near_tie",
"batch": "off", "copies": false}, "speed": {"plain_tok_s": {"median": 20.0, "least": 19.0,
"most": 21.0}, "drafted_tok_s": null, "ratio": null, "accepted_share": null,
"first_token_s": null, "prompt_tokens": null, "repeats": 1}, "source": null}"""
"""As version 1 wrote it: never changed, only joined by one of each later version."""


def changed(**changes: Any) -> bytes:
    return json.dumps(json.loads(FIRST_VERSION) | changes).encode()


SECRET = "xyzzy-ada"
"""Stands in every text that comes from this machine, a person or a checkpoint."""


def test_no_text_of_a_person_a_machine_or_a_checkpoint_comes_into_the_file() -> None:
    """Whatever texts the parts of a measurement hold, only those of this list are published."""
    request = ShareRequest(
        stage=pb.StageSpec(model=SECRET).SerializeToString().hex(),
        chip="Some CPU",
        backend="cpu",
        memory_bytes=2**34,
        published_id=None,
        quantization=None,
        initial_k=1,
        limit_s=1.0,
    )
    loaded: Any = SimpleNamespace(
        fingerprint="0" * 64,
        weight_bytes=10**9,
        head_state=SECRET,
        images=SECRET,
        kernels=[
            KernelChoice("row_groups", "product of 2 to 2", 1, True, "2 to 12 rows"),
            KernelChoice("cpu_product", SECRET, 1, True, SECRET),
        ],
    )
    spec: Any = SimpleNamespace(
        model=SECRET, path=f"/x/{SECRET}", dtype="float32", num_layers=4, mtp_off_reason=SECRET
    )
    measured = SimpleNamespace(
        identity="bitwise", batch_identity="near_tie", batching_reason=SECRET
    )
    engine: Any = SimpleNamespace(
        measurements=measured,
        lookup=SimpleNamespace(off_reason=SECRET),
        drafting=SimpleNamespace(max_k=3, off_reason=SECRET),
    )
    checks = [Check("blocks", "differs", SECRET, {"why": SECRET})]
    speed = SharedSpeed(
        plain_tok_s=Spread.of([1.0]),
        drafted_tok_s=None,
        ratio=None,
        accepted_share=None,
        first_token_s=None,
        prompt_tokens=None,
        repeats=1,
    )
    result = result_of(request, loaded, spec, engine, speed, checks, whole=True)
    assert SECRET not in result.as_json() and platform.node() not in result.as_json().split('"')
    assert result.identity.verdict == "near_tie"
    assert result.identity.sets == {"product of 2 to 2": "2 to 12 rows"}
    assert result.identity.copies is False
    part = result_of(request, loaded, spec, engine, speed, checks, whole=False)
    assert part.identity.verdict is None, "a verdict of some of the checks would be none"


def test_only_a_model_that_the_package_has_a_card_of_is_named() -> None:
    def named(model: str) -> str | None:
        local: Any = SimpleNamespace(card=SimpleNamespace(id=model))
        return published_id(local)

    assert named("demo") == "demo"
    assert named("Qwen/Qwen3.6-27B") == "Qwen/Qwen3.6-27B"
    assert named("mlx-community/Qwen3.5-0.8B-8bit") is not None
    assert named(f"{SECRET}/private") is None and named(f"my-{SECRET}") is None


def test_an_unusual_chip_is_still_a_result() -> None:
    assert plain_text("Intel(R) Xeon(R) CPU @ 2.20GHz") == "Intel(R) Xeon(R) CPU @ 2.20GHz"
    for hostile in ("", "  ", "\x00\x1b[31m", "é" * 500, "a/b\\c", "<script>", "|x|"):
        text = plain_text(hostile)
        machine = Machine(chip=text, backend="cpu", memory_gb=None, cores=None, system=text)
        assert not set(machine.chip) & set("/\\<>|\x00\x1b") and len(text) <= 80


def test_a_file_of_the_first_version_is_read_whole() -> None:
    result = read_result(FIRST_VERSION, "a.json")
    written, first = json.loads(result.as_json()), json.loads(FIRST_VERSION)
    assert written["identity"].pop("sets") == {}  # a field with a default
    assert written == first


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "all of it"),
        (b"[]", "all of it"),
        (b"\xff\xfe", "all of it"),
        (b"[" * 100_000, "all of it"),
        (changed(kind="exo-node verify"), "kind"),
        (changed(schema_version=9), "schema_version"),
        (changed(schema_version=0), "schema_version"),
        (changed(host="mine"), "host"),
        (changed(source="https://example.com"), "source"),
        (changed(date="today"), "date"),
        (FIRST_VERSION.replace(b"15.1", b"1e999"), "weight_gb"),
        (FIRST_VERSION.replace(b"20.0", b"NaN"), "median"),
        (FIRST_VERSION.replace(b"20.0", b"-1"), "median"),
        (FIRST_VERSION.replace(b"Apple M9", b"M9 | [x](y)"), "machine.chip"),
        (FIRST_VERSION.replace(b"blocks", b"a b | c"), "identity.parts"),
        (FIRST_VERSION.replace(b'"id": null', b'"id": "/srv/models/mine"'), "model.id"),
    ],
    ids=lambda value: str(value)[:20] if isinstance(value, str) else "",
)
def test_another_file_is_refused_with_its_name_and_field(raw: bytes, words: str) -> None:
    with pytest.raises(InvalidSettings) as refusal:
        _ = read_result(raw, "bad.json")
    assert "bad.json" in str(refusal.value) and words in str(refusal.value)


def test_the_page_has_a_row_for_each_file_and_its_schema_is_the_models() -> None:
    due = "run `python docs/generate.py`"
    page = (DOCS / "results.md").read_text()
    assert page == GENERATOR["with_results"](page), due
    rows = [line for line in page.splitlines() if line.startswith("| ")][1:]
    files = [*(DOCS / "results").glob("*.json")]
    assert len(rows) == len(files) > 0
    assert json.loads((DOCS / "result.schema.json").read_text()) == SharedResult.model_json_schema()


def test_figures_from_a_bench_name_a_page_that_there_is() -> None:
    for file in (DOCS / "results").glob("*.json"):
        source = read_result(file.read_bytes(), file.name).source
        assert source is None or (DOCS.parent / source).is_file()


def test_a_machine_that_needs_groups_of_rows_says_so_in_its_row() -> None:
    sets = {"product of 4 to 2": "2 to 5 rows", "a": "2 to 12 rows", "b": "2 to 5 rows"}
    identity = json.loads(FIRST_VERSION)["identity"] | {"sets": sets}
    cells = GENERATOR["_cells"](read_result(changed(identity=identity), "a.json"))
    assert cells[1] == "not named, 64 layers, 4 bits"
    assert cells[3] == "near tie; 2 to 12 rows; 2 to 5 rows"
    assert cells[4:] == ("20 (19-21) tok/s", "", "", "")


def test_a_model_that_ends_its_answers_at_once_has_no_speed() -> None:
    at_once = TimedAnswer((7,), 0.1, 0.0, "stop", None)
    assert rate([at_once, TimedAnswer((1, 2, 3), 0.1, 0.5, "stop", None)]) == 4.0
    with pytest.raises(LoadFailed, match="at once"):
        _ = rate([at_once])


def test_the_parts_are_strict() -> None:
    for part in (SharedIdentity, Machine, Model, SharedSpeed, Spread, Versions):
        assert part.model_config.get("extra") == "forbid", part
