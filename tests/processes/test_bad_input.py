"""Bad models, bad requests and bad settings end in one clear error, and a node keeps answering.

Each check has tests of its own beside its code; here an error crosses all processes.
"""

import json
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import DEMO, ORACLE
from nodes import Node, chat_body, eventually, node

CHAT = "/v1/chat/completions"
ORACLE_IDS = next(row["greedy_ids"] for row in ORACLE if row["prompt"] == "Who are you?")


def copy_of_demo(folder: Path, card: str | None = None) -> Path:
    _ = shutil.copytree(DEMO, folder, ignore=shutil.ignore_patterns("recipe", "README.md"))
    if card is not None:
        _ = (folder / "exo-card.toml").write_text(card)
    return folder


def corrupt(folder: Path) -> None:
    """Lets one tensor of the last file claim bytes past the file's end."""
    path = folder / "model-00003-of-00003.safetensors"
    raw = path.read_bytes()
    [size] = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + size])
    name = next(n for n in header if n != "__metadata__")
    begin, end = header[name]["data_offsets"]
    header[name]["data_offsets"] = [begin, end + (1 << 40)]
    text = json.dumps(header).encode()
    _ = path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + size :])


def break_head(folder: Path) -> None:
    """Makes the draft head's first weights NaN; the checkpoint's headers stay right."""
    path = folder / "model-00003-of-00003.safetensors"
    raw = bytearray(path.read_bytes())
    [size] = struct.unpack("<Q", raw[:8])
    begin = 8 + size + json.loads(raw[8 : 8 + size])["mtp.fc.weight"]["data_offsets"][0]
    raw[begin : begin + 64] = b"\xff\x7f" * 32
    _ = path.write_bytes(raw)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """A node with a models folder in which every model but `good` is bad."""
    models = tmp_path_factory.mktemp("models")
    good = "[native_mtp]\ndefault_k = 1\nmax_k = 2\n"
    _ = copy_of_demo(models / "good", good)
    corrupt(copy_of_demo(models / "corrupted", good))
    break_head(copy_of_demo(models / "nan-head", good))
    odd = copy_of_demo(models / "odd-suggestions")
    suggestions = (
        '{"temperature": "hot", "top_k": 3, "repetition_penalty": 5, "eos_token_id": [null],}'
    )
    _ = (odd / "generation_config.json").write_text(suggestions)
    (odd / "chat_template.jinja").rename(odd / "text")
    template = json.dumps({"chat_template": (odd / "text").read_text()})
    _ = (odd / "chat_template.json").write_text("\ufeff" + template)
    (odd / "special_tokens_map.json").mkdir()
    folder = tmp_path_factory.mktemp("bad-models")
    with node(folder, "--no-mdns", "--models-dir", str(models)) as started:
        yield started


def good_answer(running: Node) -> bool:
    body = running.chat("Who are you?", model="good", max_tokens=8)
    return bool(body["choices"][0]["message"]["content"])


def test_a_corrupted_checkpoint_is_named_with_its_file(running: Node) -> None:
    reply = running.call("POST", CHAT, chat_body("x", model="corrupted"))
    assert reply.status == 503, reply
    assert reply.body["error"]["code"] == "invalid_checkpoint"
    assert "model-00003-of-00003.safetensors" in reply.body["error"]["message"]
    assert good_answer(running)


def test_a_model_whose_optional_files_are_at_fault_answers(running: Node) -> None:
    """With its publisher's penalty, and the ids that a request with that penalty gets."""

    def text(model: str, **fields: Any) -> str:
        body = running.chat("Count from 5 to 15.", model=model, max_tokens=24, **fields)
        return body["choices"][0]["message"]["content"]

    penalised = text("good", repetition_penalty=5, num_draft_tokens=0)
    assert text("odd-suggestions") == penalised
    assert text("odd-suggestions", num_draft_tokens=2) == penalised
    plain = text("good", num_draft_tokens=0)
    assert text("odd-suggestions", repetition_penalty=1) == plain != penalised
    body = running.chat("x", model="odd-suggestions", max_tokens=1, temperature=None)
    assert body["generation_stats"]["sampling"] == {
        "temperature": {"value": 1.0, "source": "default"},
        "top_p": {"value": 1.0, "source": "default"},
        "top_k": {"value": 3, "source": "generation_config.json"},
        "min_p": {"value": 0.0, "source": "default"},
        "repetition_penalty": {"value": 5.0, "source": "generation_config.json"},
    }


def test_a_parked_head_is_shown_in_models_and_placements(running: Node) -> None:
    def native_mtp() -> dict[str, Any]:
        models = running.call("GET", "/v1/models").body["data"]
        return next(m["native_mtp"] for m in models if m["id"] == "nan-head")

    assert (native_mtp()["enabled"], native_mtp()["parked"]) == (True, False)
    fields = {"model": "nan-head", "max_tokens": 8}
    answer = running.chat("Who are you?", return_token_ids=True, **fields)
    assert answer["choices"][0]["token_ids"] == ORACLE_IDS[:8]
    assert answer["generation_stats"]["head_parked"]
    eventually(lambda: native_mtp()["parked"], 60)  # its runner reports at intervals
    assert (native_mtp()["enabled"], native_mtp()["weights"]) == (False, "found")
    assert "not finite at position" in native_mtp()["reason"]
    [placement] = [
        p for p in running.call("GET", "/v1/placements").body["data"] if p["model"] == "nan-head"
    ]
    assert placement["drafting"]["drafter_kind"] == "none"
    assert placement["drafting"]["reason"] == native_mtp()["reason"]


def test_prompts_and_keys_never_reach_the_log(running: Node) -> None:
    canary = "xylophone-canary"
    _ = running.chat(f"Say {canary}", model="good", max_tokens=4)
    _ = running.call("POST", CHAT, {**chat_body(canary), "temperature": 9})
    eventually(lambda: running.log.stat().st_size > 0, 60)
    log = running.log.read_text()
    assert canary not in log
    assert (running.data_dir / "cluster.key").read_text().strip() not in log
