"""`exo-node verify` on an exact machine, an inexact one, and with seeded faults."""

import getpass
import json
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import typer
from chips import M3_MAX, on_chip
from drafters import drafter_config, make_drafter
from engines import load_quietly, spec
from models import make_checkpoint
from shims import by_contents, by_rows, perturb
from small import small_checkpoint
from tiny import VOCABULARY, taped_qwen

from exo_node.mtp import batch_verdict
from exo_node.mtp.accept import VerifyResult, accept_matching
from exo_node.mtp.batch_verdict import RowDrafts
from exo_node.mtp.caches.positions import Positions
from exo_node.mtp.caches.rollback import TapedCache, rollback, with_tapes
from exo_node.mtp.families.family import draft_logits
from exo_node.mtp.families.qwen35 import Qwen35Family
from exo_node.mtp.sampling import Distribution, Noise
from exo_node.mtp.targets import FamilyTarget
from exo_node.node.cli.verify import verify as verify_command
from exo_node.node.machine.settings import load_settings
from exo_node.node.placements.local_model import resolve
from exo_node.placement.errors import InvalidCheckpoint, InvalidSettings, ModelNotFound
from exo_node.proto import peer_pb2 as pb
from exo_node.shard.engine.drafter import DraftModel
from exo_node.shard.kernels import own_keys, row_groups, row_sets
from exo_node.shard.tools import child
from exo_node.shard.tools.verify import main as verify
from exo_node.shard.tools.verify.answers import (
    check_greedy,
    first_difference,
    pattern_of,
    surprise,
)
from exo_node.shard.tools.verify.numbers import chain_of, check_blocks, compare
from exo_node.shard.tools.verify.report import Check, Report, as_json, as_text
from exo_node.shard.tools.verify.subject import ModelUnderTest, subject_of

EFFORT = verify.Effort(prompts=1, tokens=24, rows=14, samples=200)
PROMPTS = [[(5 * i + 2) % VOCABULARY for i in range(19)]]
FEWER = verify.Effort(prompts=1, tokens=16, rows=8, samples=200)
"""Enough to see a seeded fault."""
ALL = (
    "blocks",
    "rollback",
    "greedy",
    "batch",
    "seeded",
    "marginals",
)

Key = Callable[[mx.array, int], Any]


def subject(shim: Key | None = None, size: float = 1e-3, *, head: bool = True) -> ModelUnderTest:
    model = taped_qwen()
    family = Qwen35Family(model)
    mx.random.seed(5)
    draft_head: Any = family.make_head()
    mx.eval(draft_head.parameters())
    if shim is not None:
        _ = perturb(model, shim, size=size)

    def make_caches() -> list[Any]:
        return with_tapes(model.make_cache())

    return ModelUnderTest(
        FamilyTarget(family),
        make_caches,
        VOCABULARY,
        mx.float32,
        chunk=8,
        max_k=3,
        draft_model=DraftModel(draft_head, family.embed, draft_logits(family, draft_head))
        if head
        else None,
        no_drafts="" if head else "its weights were stripped",
        modules=[module for _, module in model.named_modules()],
    )


def checked(
    of: ModelUnderTest, upto: str = ALL[-1], effort: verify.Effort = EFFORT
) -> dict[str, Check]:
    """The checks up to the one named `upto`."""
    checks: dict[str, Check] = {}
    for check in verify.run_checks(of, PROMPTS, effort, lambda _: None):
        checks[check.name] = check
        if check.name == upto:
            break
    return checks


def findings(checks: dict[str, Check]) -> dict[str, str]:
    return {name: check.finding for name, check in checks.items()}


def report(checks: Sequence[Check], head: str = "loaded") -> Report:
    model: dict[str, Any] = {"id": "m", "dtype": "float32", "quantization": None, "head": head}
    model["kv_bits"] = None
    device = {"chip": "a chip", "backend": "cpu", "memory_bytes": 2**34}
    return Report("now", {"mlx": "0"}, device, model, {}, tuple(checks), 1.0)


@pytest.fixture(scope="module")
def exact() -> dict[str, Check]:
    return checked(subject())


def test_the_cpu_is_exact(exact: dict[str, Check]) -> None:
    assert findings(exact) == dict.fromkeys(ALL, "ok")
    assert report(list(exact.values())).verdict == "exact"
    per_k = exact["blocks"].numbers["per_k"]
    assert [each["k"] for each in per_k] == [1, 2, 3]
    assert all(each["rows"] == 14 and each["rows_different"] == 0 for each in per_k)


def test_a_backend_that_rounds_by_rows_is_a_near_tie() -> None:
    checks = checked(subject(by_rows, 1e-4), effort=FEWER)
    assert checks["blocks"].finding == "differs"
    assert checks["rollback"].finding == "ok"
    assert "defect" not in findings(checks).values()
    assert report(list(checks.values())).verdict == "near_tie"
    assert checks["blocks"].numbers["per_k"][0]["near_tie_tau"] > 0


def test_near_ties_explain_greedy_answers_that_differ() -> None:
    of, prompts = subject(by_rows, 1e-3), [[(5 * i + 1) % VOCABULARY for i in range(19)]]
    blocks, checks = check_blocks(of, chain_of(of, PROMPTS[0], PROMPTS[0]))
    assert blocks.finding == "differs" and blocks.summary.endswith("; first in: Perturbed")
    tau = max(each.tau for each in checks)
    greedy = check_greedy(of, prompts, 16, tau, bitwise=False)
    assert greedy.finding == "differs"
    gaps = [gap for each in greedy.numbers["per_k"] for gap in each["top2_gap_at_difference"]]
    assert 0 < max(gaps) < greedy.numbers["largest_near_tie"]
    assert check_greedy(of, prompts, 16, tau, bitwise=True).finding == "defect"
    assert check_greedy(of, prompts, 16, min(gaps) / 100, bitwise=False).finding == "defect"


@pytest.mark.parametrize(
    ("at", "pattern"),
    [
        ((None, None, None), "none"),
        ((9, 9, 9), "at the same token for every K"),
        ((30, 20, 10), "earlier with every further draft"),
        ((30, 10, 20), "mixed"),
    ],
)
def test_where_answers_differ_first_tells_rounding_from_a_fault(
    at: tuple[int | None, ...], pattern: str
) -> None:
    assert pattern_of([[first] for first in at]) == pattern


def test_numbers_beyond_rounding_are_a_defect() -> None:
    checks = checked(subject(by_rows, 0.1), "blocks")
    assert checks["blocks"].finding == "defect"


def test_rejected_rows_may_be_seen_where_rows_depend_on_those_after_them() -> None:
    checks = checked(subject(by_contents, 1e-5), "rollback", FEWER)
    assert checks["rollback"].finding == "differs"


def test_each_drafter_that_may_draft_is_examined(tmp_path: Path) -> None:
    target = make_checkpoint(tmp_path / "t", "qwen3_5", dtype="float32", vocab=4096)
    drafter = make_drafter(tmp_path / "d", drafter_config(4096))
    fields: dict[str, Any] = {"drafter": "a/d", "drafter_path": str(drafter)}
    fields["drafter_bytes"] = 1 << 20
    both = load_quietly(spec(target, 0, 4, num_layers=4, native_mtp=True, **fields))
    subject = subject_of(both, mx.float32, 8, 2)
    found = findings(checked(subject, "", verify.Effort(1, 6, 4, 40)))
    by_drafter = [f"{n} by {kind}" for kind in ("block_drafter", "native_mtp") for n in ALL[2:]]
    assert found == dict.fromkeys([*ALL[:2], *by_drafter], "ok")


def test_a_model_without_a_head_is_checked_as_far_as_that_goes() -> None:
    checks = checked(subject(head=False), effort=FEWER)
    for name in ("blocks", "rollback", "batch"):
        assert checks[name].finding == "ok"
    for name in ("greedy", "seeded", "marginals"):
        assert checks[name] == Check(name, "skipped", "its weights were stripped", {})
    text = as_text(report(list(checks.values()), head="stripped"))
    assert "drafts nothing here" in text


# ------------------------------------------------------------------------------ seeded faults


def leave_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rejected row stays in every cache."""

    def short(caches: Sequence[object], rows: int) -> None:
        rollback(caches, rows - 1 if rows > 1 else rows)

    for module in ("engine.states.cache_set", "tools.verify.subject"):
        monkeypatch.setattr(f"exo_node.shard.{module}.rollback", short)


def keep_the_recurrent_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention is trimmed, the recurrence is not."""

    def forget(self: TapedCache, rows: int) -> None:
        del rows
        self.forget()

    monkeypatch.setattr(TapedCache, "rollback", forget)


def accept_likely_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accepts a draft where it is the target's likeliest token: biased when sampling."""

    def by_argmax(
        p: Distribution, q: Distribution, drafts: mx.array, noise: Noise, at: int
    ) -> VerifyResult:
        del q, noise, at
        best = p.log_p.argmax(axis=-1)
        ids = best if p.ids is None else mx.take_along_axis(p.ids, best[:, None], axis=-1)[:, 0]
        return accept_matching(ids, drafts)

    monkeypatch.setattr("exo_node.mtp.sampler.accept_by_block", by_argmax)


def accept_one_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first draft is taken unseen."""

    def trusting(targets: mx.array, drafts: mx.array) -> VerifyResult:
        return accept_matching(mx.concatenate([drafts[:1], targets[1:]]), drafts)

    greedy = batch_verdict._greedy  # pyright: ignore[reportPrivateUsage]

    def trusting_greedily(
        logits: mx.array, drafts: RowDrafts | None, limits: Sequence[int]
    ) -> mx.array:
        if drafts is not None:
            drafted = mx.arange(logits.shape[2]) == drafts.tokens[:, :1, None]
            logits = mx.concatenate([drafted.astype(logits.dtype), logits[:, 1:]], axis=1)
        return greedy(logits, drafts, limits)

    monkeypatch.setattr(batch_verdict, "_greedy", trusting_greedily)
    monkeypatch.setattr("exo_node.mtp.sampler.accept_matching", trusting)


def show_everybody_the_longest_past(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of a batch see rows that are not theirs."""

    def longest(self: Positions, rows: int, window: int | None) -> mx.array:
        del window
        past = mx.arange(self.extent(rows)) <= max(self.rows) + mx.arange(rows)[:, None]
        return mx.broadcast_to(past, (len(self.rows), 1, *past.shape))

    monkeypatch.setattr(Positions, "mask", longest)


@pytest.mark.parametrize(
    ("fault", "seen_by"),
    [
        (show_everybody_the_longest_past, {"batch"}),
        (leave_one_row, {"rollback", "greedy", "seeded"}),
        (keep_the_recurrent_state, {"rollback", "greedy", "seeded"}),
        (accept_likely_drafts, {"marginals"}),
        (accept_one_too_many, {"greedy", "seeded"}),
    ],
)
def test_a_seeded_fault_is_a_defect(
    fault: Callable[[pytest.MonkeyPatch], None],
    seen_by: set[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of = subject()
    fault(monkeypatch)
    checks = checked(of, max(seen_by, key=ALL.index), FEWER)
    assert seen_by <= {name for name, finding in findings(checks).items() if finding == "defect"}
    assert report(list(checks.values())).exit_status == 1


def test_rounds_that_a_node_builds_ahead_are_examined(monkeypatch: pytest.MonkeyPatch) -> None:
    of = replace(subject(), runs_ahead=True)
    sound = checked(of, "greedy", FEWER)
    assert {sound[name].finding for name in ("blocks", "rollback", "greedy")} == {"ok"}

    def keep_all(caches: object, counts: object) -> None:
        """A rejected draft's row stays in the recurrent states."""

    monkeypatch.setattr("exo_node.shard.engine.states.cache_set.keep_rows", keep_all)
    assert checked(of, "greedy", FEWER)["greedy"].finding == "defect"


def test_a_rollback_fault_is_seen_on_a_backend_that_rounds_by_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of = subject(by_rows, 1e-4)
    leave_one_row(monkeypatch)
    assert checked(of, "rollback", FEWER)["rollback"].finding == "defect"


# --------------------------------------------------------------------------------- its figures


def test_logits_are_compared_row_by_row() -> None:
    expected = mx.array([[0.0, 4.0, 3.0], [1.0, 0.0, 5.0]])
    same = compare(expected, expected)
    assert (same.rows, same.rows_different, same.largest, same.gaps) == (2, 0, 0.0, ())
    other = compare(expected, mx.array([[0.0, 3.0, 3.5], [1.0, 0.0, 5.0]]))
    assert (other.rows_different, other.largest, other.gaps, other.tau) == (1, 1.0, (1.0,), 2.0)


def test_numbers_that_are_none_are_an_error() -> None:
    with pytest.raises(InvalidCheckpoint, match="no finite numbers in this dtype"):
        _ = compare(mx.array([[0.0, 1.0]]), mx.array([[0.0, float("nan")]]))


@pytest.mark.parametrize(
    ("a", "b", "at"), [((1, 2), (1, 2), None), ((1, 2), (1, 3), 1), ((1,), (1, 2), 1)]
)
def test_answers_differ_first_at(a: tuple[int, ...], b: tuple[int, ...], at: int | None) -> None:
    assert first_difference(a, b) == at


@pytest.mark.smoke
def test_surprise_is_small_for_the_right_distribution_and_large_for_another() -> None:
    p = np.array([0.5, 0.3, 0.15, 0.05, 0.0])
    rng = np.random.default_rng(0)
    fair = [surprise(rng.choice(5, 400, p=p), p) for _ in range(200)]
    assert abs(float(np.mean(fair))) < 0.3
    assert 0.7 < float(np.std(fair)) < 1.3
    assert surprise(rng.choice(5, 400, p=[0.65, 0.15, 0.15, 0.05, 0]), p) > 5
    assert surprise(np.array([0] * 399 + [4]), p) == 100.0


# ------------------------------------------------------------------------- report and process


def test_the_report_is_json_with_its_schema_and_names_nobody(exact: dict[str, Check]) -> None:
    report_json = json.loads(as_json(report(list(exact.values()))))
    assert (report_json["schema"], report_json["kind"], report_json["verdict"]) == (
        2,
        "exo-node verify",
        "exact",
    )
    assert [check["name"] for check in report_json["checks"]] == list(ALL)


def test_packages_that_nobody_installed_have_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package on PYTHONPATH has none: a report was lost to a traceback there."""

    def version(name: str) -> str:
        if name == "exo-node":
            raise PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(child, "version", version)
    report_json = verify.versions()
    assert (report_json["exo_node"], report_json["mlx"]) == ("not installed", "1.0")


def test_a_defect_says_what_to_do() -> None:
    text = as_text(report([Check("greedy", "defect", "answers differ", {})]))
    assert "defect  greedy  answers differ" in text
    assert "send us the report" in text


@pytest.fixture
def whole_request(tmp_path: Path) -> tuple[verify.VerifyRequest, pb.StageSpec]:
    """The command's request for a folder whose card declares the head."""
    return request_of(tmp_path / "model", small_checkpoint())


def request_of(
    folder: Path, source: Path, card: str = ""
) -> tuple[verify.VerifyRequest, pb.StageSpec]:
    _ = shutil.copytree(source, folder)
    head = "[native_mtp]\ndefault_k = 1\nmax_k = 3\n"
    _ = (folder / "exo-card.toml").write_text(card + head)
    known_model = resolve(str(folder), load_settings({"dtype": "float32"}, {}), frozenset())
    request = verify.VerifyRequest(
        stage=known_model.spec.SerializeToString().hex(),
        k=1,
        quick=True,
        json_file="",
        chip="a chip",
        backend="cpu",
        memory_bytes=2**34,
        quantization=None,
    )
    line = request.model_dump_json().encode()
    request = child.parse_request("verify", verify.VerifyRequest, line)
    return request, request.spec


def test_a_model_is_exact_from_its_files_to_the_report(
    whole_request: tuple[verify.VerifyRequest, pb.StageSpec],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    small = verify.Effort(prompts=1, tokens=6, rows=4, samples=40)
    monkeypatch.setattr(verify, "QUICK", small)
    request, spec = whole_request
    verify_report = verify.run_verify(request, spec, lambda _: None)
    assert (verify_report.verdict, verify_report.exit_status, verify_report.settings["max_k"]) == (
        "exact",
        0,
        1,
    )
    file = tmp_path / "report.json"
    verify.write_report(verify_report, str(file))
    assert "Exact: on this machine drafts change no answer" in capsys.readouterr().out
    text = file.read_text()
    report_json = json.loads(text)
    assert report_json["model"]["head"] == "loaded"
    assert len(report_json["model"]["fingerprint"]) == 64
    assert {"exo_node", "mlx", "mlx_lm"} <= report_json["versions"].keys()
    for private in (str(Path.home()), spec.path, platform.node(), f'"{getpass.getuser()}"'):
        assert private not in text
    verify.write_report(verify_report, "-")
    assert json.loads(capsys.readouterr().out) == report_json
    with pytest.raises(InvalidSettings, match=r"^--report .* cannot be written"):
        verify.write_report(verify_report, str(tmp_path))


def test_the_sets_of_a_chip_are_in_one_table_and_in_the_json(
    whole_request: tuple[verify.VerifyRequest, pb.StageSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "QUICK", verify.Effort(prompts=1, tokens=6, rows=4, samples=40))
    monkeypatch.setattr(row_sets, "VALUES", 64)
    with on_chip(M3_MAX):
        on_m3 = verify.run_verify(*whole_request, lambda _: None)
    kernels = json.loads(as_json(on_m3))["kernels"]
    sets = {each["shape"]: each["reason"] for each in kernels if each["kernel"] == row_groups.NAME}
    assert len(sets) > 4 and set(sets.values()) == {"2 to 64 rows give the same bits"}
    lines = as_text(on_m3).splitlines()
    assert max(map(len, lines)) <= 96
    header = next(i for i, line in enumerate(lines) if line.startswith("part "))
    parts = " ".join(re.split(" {2,}", line)[0] for line in lines[header:])  # some are wrapped
    assert lines[header].split() == ["part", "layers", "computed", "by", "because"]
    assert [each for each in sets if each not in parts] == []
    [attention] = [each for each in kernels if each["kernel"] == own_keys.NAME]
    assert attention["shape"] in parts and attention["layers"] == 1
    assert re.match(r"blocks of up to \d+ rows", attention["reason"])
    assert not [line for line in lines[:header] if "rows give" in line], "it is the only table"


def test_a_model_with_quantised_caches_is_exact_among_them_and_the_report_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    small = verify.Effort(prompts=1, tokens=6, rows=4, samples=40)
    monkeypatch.setattr(verify, "QUICK", small)
    folder = small_checkpoint(hidden=128)  # a head has 32 numbers, the smallest group
    request, spec = request_of(tmp_path / "model", folder, "kv_bits = 8\n")
    assert (spec.kv_bits, spec.kv_group_size) == (8, 32)
    verify_report = verify.run_verify(request, spec, lambda _: None)
    assert (verify_report.verdict, verify_report.model["kv_bits"]) == ("exact", 8)
    assert "(float32, caches of 8 bits on both sides" in as_text(verify_report)
    report_json = findings({c.name: c for c in verify_report.checks})
    assert (report_json["rollback"], report_json["batch"]) == ("ok", "ok")


@pytest.mark.parametrize("line", [b"", b"{}", b"\xff", b'{"stage": "zz"}'])
def test_a_malformed_request_is_refused(line: bytes) -> None:
    with pytest.raises(InvalidSettings, match="malformed"):
        _ = child.parse_request("verify", verify.VerifyRequest, line)


def test_the_child_takes_what_the_command_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[str] = []

    def run_child(module: str, request: str, environment: Mapping[str, str]) -> int:
        assert (module, "EXO_DTYPE" in environment) == ("exo_node.shard.tools.verify.main", False)
        requests.append(request)
        return 0

    monkeypatch.setattr("exo_node.node.cli.verify.run_child", run_child)
    expected: dict[str, Any] = {"dtype": "float32", "quick": True, "models_dir": None}
    with pytest.raises(typer.Exit):
        verify_command("demo", k=2, report="-", **expected)
    request = child.parse_request("verify", verify.VerifyRequest, requests[0].encode())
    spec = request.spec
    assert (request.k, request.json_file, request.quick) == (2, "-", True)
    assert (spec.model, spec.dtype, spec.native_mtp) == ("demo", "float32", True)
    with pytest.raises(InvalidSettings, match="--k: 8, and demo drafts at most 7"):
        verify_command("demo", k=8, report=None, **expected)


def test_the_child_ends_with_one_line_for_an_error() -> None:
    verify_report = subprocess.run(
        (sys.executable, "-P", "-m", "exo_node.shard.tools.verify.main"),
        input=b"{}\n",
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert (verify_report.returncode, verify_report.stdout) == (2, b"")
    assert verify_report.stderr.decode().count("\n") == 1
    assert (
        "exo-node: the request of `exo-node verify` is malformed" in verify_report.stderr.decode()
    )


# --------------------------------------------------------------------------- models by name


def test_a_model_is_found_by_id_and_by_folder(tmp_path: Path) -> None:
    settings = load_settings({}, {})
    by_id = resolve("demo", settings, frozenset())
    assert by_id.spec.native_mtp
    assert by_id.spec.end_layer == by_id.card.num_layers
    by_folder = resolve(str(by_id.folder), settings, frozenset())
    assert by_folder.folder == by_id.folder
    assert (by_folder.spec.native_mtp, by_folder.spec.max_draft_tokens) == (True, 7)  # no card
    with pytest.raises(InvalidCheckpoint, match=r"holds no config\.json"):
        _ = resolve(str(tmp_path), settings, frozenset())
    with pytest.raises(ModelNotFound, match="Did you mean demo"):
        _ = resolve("demp", settings, frozenset())


def test_a_node_that_has_drafts_turned_off_says_so() -> None:
    checks = resolve("demo", load_settings({}, {"EXO_NATIVE_MTP_ENABLED": "0"}), frozenset())
    assert not checks.spec.native_mtp
    assert "EXO_NATIVE_MTP_ENABLED=0" in checks.spec.mtp_off_reason
