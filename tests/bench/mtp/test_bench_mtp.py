"""`exo-node bench mtp`: its arithmetic on canned figures, its files, its refusals, its child."""

import csv
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from api_stub import exo_node
from small import small_checkpoint, small_spec

from exo_node.node.store.library import DEFAULT_HEAD
from exo_node.placement.errors import InvalidSettings
from exo_node.proto import peer_pb2 as pb
from exo_node.shard.tools.child import parse_request
from exo_node_bench.mtp.arm_tables import as_text
from exo_node_bench.mtp.main import run_bench
from exo_node_bench.mtp.request import BenchRequest
from exo_node_bench.mtp.results import Results

# ------------------------------------------------------------- a sweep on the small model

MODEL = str(small_checkpoint())
NAME = Path(MODEL).name


@dataclass(frozen=True, slots=True)
class Bench:
    """The files and output of one command."""

    folder: Path
    stdout: str
    stderr: str
    body: dict[str, Any]

    def arm(self, name: str) -> dict[str, Any]:
        [match] = [arm for arm in self.body["arms"] if arm["arm"] == name]
        return match


PROMPTS = (
    {"prompt": "Count from 5 to 15.", "id": "count", "category": "list"},
    {"prompt": "Who are you?", "id": "who", "category": "question $x_$ <b>"},
    {"prompt": "word " * 5000, "id": "endless", "category": "long"},
)
TOKENS = 10


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """The command itself, once, with every arm."""
    work = tmp_path_factory.mktemp("bench")
    prompts, folder = work / "mine.jsonl", work / "out"
    _ = prompts.write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS))
    process = exo_node(
        *("bench", "mtp", MODEL, "--prompts", str(prompts), "--k", "0,1,2"),
        *("--max-tokens", str(TOKENS)),
        *("--repeats", "2", "--dtype", "float32", "--against", "mlx-lm", "--output", str(folder)),
    )
    assert process.returncode == 0, process.stderr
    body = json.loads((folder / "mtp.json").read_text())
    return Bench(folder, process.stdout, process.stderr, body)


def test_every_arm_answers_every_prompt_in_every_repeat(swept: Bench) -> None:
    names = ["mlx-lm", "K=0", "K=1", "K=2", "adaptive", "lookup", "both"]
    assert [arm["arm"] for arm in swept.body["arms"]] == names
    ran = sorted((run["repeat"], run["prompt"], run["arm"]) for run in swept.body["runs"])
    assert ran == sorted((r, p, name) for r in range(2) for p in range(2) for name in names)
    assert all(run["tokens"] == TOKENS for run in swept.body["runs"])
    assert all(run["decode_s"] > 0 and run["ttft_s"] > 0 for run in swept.body["runs"])


def test_the_arms_draft_what_they_say_and_give_the_same_ids(swept: Bench) -> None:
    for k in (1, 2):
        arm = swept.arm(f"K={k}")
        assert arm["k"] == k
        assert 0 < arm["accepted"] <= arm["proposed"] <= k * arm["rounds"]
        assert len(arm["acceptance_per_position"]) == k
        assert arm["tokens_per_round"] > 1
        assert arm["verify_steps"] > 0
        assert arm["draft_steps"] > 0
    assert swept.arm("K=0")["draft_k_histogram"] == [2 * 2 * (TOKENS - 1)]
    assert swept.arm("adaptive")["kind"] == "adaptive"
    assert (swept.arm("lookup")["k"], swept.arm("both")["k"]) == (0, 7)
    assert {arm["same_ids"] for arm in swept.body["arms"]} == {2}
    assert swept.arm("K=0")["vs_off"] == {"median": 1.0, "least": 1.0, "most": 1.0}


def test_a_prompt_over_the_context_is_skipped_and_named(swept: Bench) -> None:
    [skipped] = swept.body["skipped"]
    assert skipped.startswith("endless: its ")
    assert f"skipped {skipped}\n" in swept.stderr
    assert [prompt["name"] for prompt in swept.body["prompts"]] == ["count", "who"]


def test_the_json_names_device_versions_settings_and_model(swept: Bench) -> None:
    body = swept.body
    assert (body["kind"], body["schema"]) == ("exo-node bench mtp", 1)
    assert set(body["versions"]) == {"exo-node", "mlx", "mlx-lm", "Python"}
    assert body["device"]["chip"] and body["device"]["peak_memory_bytes"] > 0
    assert body["settings"]["prompts"] == "mine.jsonl"
    assert body["settings"]["repeats"] == 2
    assert body["settings"]["initial_k"] == DEFAULT_HEAD["default_k"]
    assert (body["model"]["id"], body["model"]["dtype"]) == (NAME, "float32")
    assert (body["no_drafts"], body["greedy_identity"]) == ("", "bitwise")
    assert len(body["costs"]["verify"]) == 8
    assert body["costs"]["verify"][0] == 1.0
    assert str(Path(MODEL).parent) not in json.dumps(body)


def test_the_csv_has_one_row_an_arm_with_the_jsons_figures(swept: Bench) -> None:
    rows = list(csv.DictReader(io.StringIO((swept.folder / "mtp.csv").read_text())))
    assert [row["arm"] for row in rows] == [arm["arm"] for arm in swept.body["arms"]]
    for row, arm in zip(rows, swept.body["arms"], strict=True):
        for part, column in (("median", ""), ("least", "_least"), ("most", "_most")):
            assert float(row[f"tok_s{column}"]) == pytest.approx(arm["tok_s"][part], rel=1e-4)
        assert row["accepted"] == ("" if arm["accepted"] is None else str(arm["accepted"]))
        assert (row["model"], row["device"]) == (NAME, swept.body["device"]["chip"])


def test_the_tables_go_to_stdout_and_the_notes_to_stderr(swept: Bench) -> None:
    lines = swept.stdout.splitlines()
    assert lines[0] == f"{NAME}, float32, greedy, 2 prompts, at most 10 tokens, 2 repeats"
    for start in ("K=2 ", "adaptive ", "mlx-lm ", "list ", "question "):
        assert any(line.startswith(start) for line in lines), start
    [header] = [line for line in lines if "TOK/S" in line]
    for column in ("VS K=0", "VS MLX-LM", "TTFT MS", "SAME IDS"):
        assert column in header
    assert "break-even" in swept.stdout
    assert max(map(len, lines)) <= 120
    assert f"written to {swept.folder}: index.html" in swept.stderr


# --------------------------------------------------------------- sweeps inside this process


def bench_request(tmp_path: Path, **changes: Any) -> BenchRequest:
    prompts = tmp_path / "prompts.txt"
    _ = prompts.write_text("Who are you?\n")
    fields: dict[str, Any] = {
        "stage": pb.StageSpec(native_mtp=True, max_draft_tokens=3).SerializeToString().hex(),
        "depths": (),
        "adaptive": False,
        "against_mlx_lm": False,
        "prompts": str(prompts),
        "max_tokens": 6,
        "repeats": 1,
        "temperature": 0.0,
        "output": str(tmp_path / "out"),
        "chip": "a chip",
        "backend": "cpu",
        "memory_bytes": 1,
    }
    return BenchRequest(**(fields | changes))


@pytest.fixture(scope="module")
def headless(tmp_path_factory: pytest.TempPathFactory) -> Results:
    stage_spec = small_spec(native_mtp=False, mtp_off_reason="no head, says a test")
    return run_bench(bench_request(tmp_path_factory.mktemp("headless"), adaptive=True), stage_spec)


def test_without_a_head_only_k_0_runs_and_the_reason_is_shown(headless: Results) -> None:
    assert [arm.arm for arm in headless.arms] == ["K=0"]
    assert headless.no_drafts == "no head, says a test"
    assert headless.costs is None
    assert as_text(headless).endswith("only K=0 ran: no head, says a test")


# ------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["demmo"], 1, "Did you mean demo?"),
        (["./nowhere"], 1, "./nowhere"),
        (["--k", "9"], 2, "--k: 9, and demo drafts at most 7 tokens a round"),
        (["--k", "1;2"], 2, "--k: '1;2'; write numbers with commas between them"),
        (["--prompts", "nowhere.txt"], 2, "nowhere.txt: there is no such file"),
        (["--against", "vllm"], 2, "--against: 'vllm'; it knows mlx-lm"),
        (["--dtype", "int4"], 2, "--dtype: "),
        (["--output", str(Path(__file__))], 2, "is not a folder"),
        (["--output", str(Path(__file__).parents[2])], 2, "is not empty"),
    ],
)
def test_bad_input_is_one_clear_line(
    tmp_path: Path, arguments: list[str], status: int, says: str
) -> None:
    output = [] if "--output" in arguments else ["--output", str(tmp_path / "out")]
    process = exo_node("bench", "mtp", *arguments, *output)
    assert (process.returncode, process.stdout) == (status, "")
    assert process.stderr.startswith("exo-node: ")
    assert says in process.stderr
    assert process.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def _requested(changes: Mapping[str, object]) -> bytes:
    stage_spec = pb.StageSpec(model="demo", native_mtp=True, max_draft_tokens=2)
    body: dict[str, object] = {
        "stage": stage_spec.SerializeToString().hex(),
        "depths": [1, 2],
        "adaptive": True,
        "against_mlx_lm": False,
        "prompts": None,
        "max_tokens": 8,
        "repeats": 1,
        "temperature": 0,
        "output": "o",
        "chip": "c",
        "backend": "cpu",
        "memory_bytes": 1,
    }
    return json.dumps({**body, **changes}).encode()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("depths", [3]),
        ("initial_k", 3),
        ("repeats", 0),
        ("stage", "ff"),
        ("more", 1),
        ("backend", None),
    ],
)
def test_the_child_checks_what_it_is_asked(field: str, value: object) -> None:
    with pytest.raises(InvalidSettings) as refused:
        _ = parse_request("bench mtp", BenchRequest, _requested({field: value}))
    assert refused.value.param == field
