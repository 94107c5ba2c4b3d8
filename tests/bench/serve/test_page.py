"""The page and files of a bench: what they contain, and which names they never do."""

import getpass
import json
import re
import socket
from pathlib import Path

import pytest
from api_stub import in_process
from http_node import serving
from openai_server import OpenAiServer

from exo_node_bench.serve.facts import model_label
from exo_node_bench.serve.result import Result

QUESTION = "Does Leonora keep her savings in the blue teapot"
STATS = {
    "drafter_kind": "native_mtp",
    "draft_policy": "adaptive",
    "num_draft_tokens": 3,
    "spec_decode_rounds": 2,
    "proposed_draft_tokens": 4,
    "accepted_draft_tokens": 3,
    "drafting_reason": "leonoras-mac is slow",
    "placement": {"id": "p-1", "stages": [{"node": "idofnode", "layers": [0, 8]}]},
}
NODE = {
    "id": "idofnode",
    "name": "leonoras-mac",
    "version": "0.1.0",
    "host": "192.168.77.5",
    "port": 52416,
    "chip": "Apple M4 Max",
    "backend": "metal",
    "memory_bytes": 48_000_000_000,
}
REPLIES = {
    "/v1/cluster": {
        "version": "0.1.0",
        "self": "idofnode",
        "cluster": "0123456789abcdef",
        "nodes": [NODE, {**NODE, "id": "idofother", "name": "leonoras-pc", "chip": "AMD EPYC"}],
    },
    "/v1/models/m": {
        "id": "m",
        "quantization": 4,
        "format": "bfloat16",
        "context_length": 4096,
        "parameters": 27_000_000_000,
        "nodes": ["leonoras-mac"],
    },
    "/v1/placements": {
        "data": [
            {
                "model": "m",
                "status": "ready",
                "dtype": "float32",
                "context_length": 2048,
                "reason": "leonoras-mac and leonoras-pc, estimated",
                "stages": [
                    {"node": "idofnode", "layers": [0, 20]},
                    {"node": "idofother", "layers": [20, 32]},
                ],
            }
        ]
    },
}
NAMES = (
    *("leonora", "teapot", "idofnode", "idofother", "0123456789abcdef", "somebody", "10.1.2.3"),
    *("192.168.77.5", "127.0.0.1", "localhost", "/srv", "/tmp", "opensesame", "s3cret"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The result of a bench of a server that tells all it knows, and fails a third of the time."""
    root = tmp_path_factory.mktemp("leonora")
    _ = (root / "questions.txt").write_text(f"{QUESTION}?\n")
    server = OpenAiServer(fault="500", replies=REPLIES, stats=STATS)
    other = OpenAiServer(models={"data": [{"id": "/srv/somebody/models/tiny"}]})
    with serving(server.app()) as port, serving(other.app()) as second:
        result = in_process(
            *("bench", "serve", "--output", str(root / "out"), "--limit", "0"),
            *("--server", f"ours=http://127.0.0.1:{port}", "--key", "ours=KEY"),
            *("--server", f"other=http://localhost:{second}/v1"),
            *("--questions", str(root / "questions.txt"), "--workloads", "questions,32"),
            *("--concurrency", "1,3", "--requests", "3", "--repeats", "2"),
            *("--extra-body", '{"user": "s3cret", "num_draft_tokens": 3, "ignore_eos": true}'),
            KEY="opensesame",
        )
    assert result.exit_code == 1, result.output
    return root / "out"


def files(folder: Path) -> dict[str, str]:
    return {file.name: file.read_text() for file in folder.iterdir()}


def test_no_file_names_a_machine_a_person_an_address_a_path_or_a_prompt(folder: Path) -> None:
    texts = files(folder)
    assert sorted(texts) == ["index.html", "serve.csv", "serve.json"]
    names = [*NAMES, str(Path.home()), f"/{getpass.getuser()}/"]
    leaks = [(file, name) for file, text in texts.items() for name in names if name in text.lower()]
    assert leaks == []
    host = re.compile(rf"(?<!\w){re.escape(socket.gethostname())}(?!\w)", re.IGNORECASE)
    assert [file for file, text in texts.items() if host.search(text)] == []
    addresses = {
        (file, *re.findall(r"\b\d+\.\d+\.\d+\.\d+\b", text)) for file, text in texts.items()
    }
    assert {len(each) for each in addresses} == {1}, addresses


def test_the_page_has_the_facts_that_a_reader_needs(folder: Path) -> None:
    page = " ".join(re.sub(r"<style>.*?</style>|<[^>]+>", " ", _page(folder), flags=re.S).split())
    for fact in (
        *("4 bits, files in bfloat16", "Computes in float32", "27 billion", "2,048 tokens"),
        "2 nodes: Apple M4 Max (metal, 48 GB for models, 20 layers), AMD EPYC",
        "native_mtp, adaptive, K up to 3 (",
        "another OpenAI server",
        "tiny",
        "user, num_draft_tokens = 3, ignore_eos = true",
        "HTTP 500",
        "75.0 %",
        "taken within each repeat",
        "medians over the repeats",
        "A closed loop",
        "1 question behind a number",
    ):
        assert fact in page, fact
    assert re.search(r"exo-node [\w.]+, mlx [\d.]+, mlx-lm [\d.]+, Python 3", page)


def _page(folder: Path) -> str:
    return (folder / "index.html").read_text()


def test_the_json_is_what_its_schema_says(folder: Path) -> None:
    text = (folder / "serve.json").read_text()
    result = Result.model_validate_json(text)
    assert json.loads(text) == json.loads(result.model_dump_json())
    assert [server.name for server in result.servers] == ["ours", "other"]
    assert {run.failures.get("HTTP 500", 0) for run in result.runs if run.server == "other"} == {0}


def test_the_documented_schema_is_the_models() -> None:
    """Else: `python docs/generate.py`."""
    root = Path(__file__).parents[3]
    committed = json.loads((root / "docs" / "bench-serve.schema.json").read_text())
    assert committed == Result.model_json_schema()


@pytest.mark.parametrize(
    ("model", "label"),
    [
        ("Qwen/Qwen3.6-27B", "Qwen/Qwen3.6-27B"),
        ("/srv/me/models/tiny/", "tiny"),
        ("~/tiny", "tiny"),
        ("./tiny", "tiny"),
        ("models/of/me/tiny", "tiny"),
        (r"C:\Users\me\tiny", "tiny"),
        ("a\x1bb", "a?b"),
    ],
)
def test_of_a_model_that_is_a_path_only_its_name_is_shown(model: str, label: str) -> None:
    assert model_label(model) == label
