"""Bad input over HTTP, on disk and at start: one clear error, and the node answers on."""

import json
import shutil
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import DEMO, ORACLE
from nodes import READY_WITHIN_S, Node, chat_body, eventually, node, start_process

CHAT = "/v1/chat/completions"
ORACLE_IDS = next(row["greedy_ids"] for row in ORACLE if row["prompt"] == "Who are you?")


def copy_of_demo(folder: Path, card: str | None = None) -> Path:
    _ = shutil.copytree(DEMO, folder, ignore=shutil.ignore_patterns("recipe", "README.md"))
    if card is not None:
        _ = (folder / "exo-card.toml").write_text(card)
    return folder


def corrupt(folder: Path) -> None:
    """One tensor of the last file claims bytes past its end."""
    path = folder / "model-00003-of-00003.safetensors"
    raw = path.read_bytes()
    [size] = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + size])
    name = next(n for n in header if n != "__metadata__")
    begin, end = header[name]["data_offsets"]
    header[name]["data_offsets"] = [begin, end + (1 << 40)]
    text = json.dumps(header).encode()
    _ = path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + size :])


def without_a_distribution(folder: Path) -> None:
    """The draft head's first weights are NaN; what the checkpoint says of itself stays right."""
    path = folder / "model-00003-of-00003.safetensors"
    raw = bytearray(path.read_bytes())
    [size] = struct.unpack("<Q", raw[:8])
    begin = 8 + size + json.loads(raw[8 : 8 + size])["mtp.fc.weight"]["data_offsets"][0]
    raw[begin : begin + 64] = b"\xff\x7f" * 32
    _ = path.write_bytes(raw)


@pytest.fixture(scope="module")
def hardened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """With a models folder in which every model but one is bad."""
    models = tmp_path_factory.mktemp("models")
    good = "[native_mtp]\ndefault_k = 1\nmax_k = 2\n"
    _ = copy_of_demo(models / "good", good)
    corrupt(copy_of_demo(models / "corrupted", good))
    _ = copy_of_demo(models / "backwards", "[native_mtp]\ndefault_k = 3\nmax_k = 1\n")
    _ = copy_of_demo(models / "undeclared")
    without_a_distribution(copy_of_demo(models / "nan-head", good))
    folder = tmp_path_factory.mktemp("hardened")
    with node(folder, "--no-mdns", "--models-dir", str(models)) as running:
        yield running


def good_answer(running: Node) -> bool:
    body = running.chat("Who are you?", model="good", max_tokens=8)
    return bool(body["choices"][0]["message"]["content"])


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"\xff\xfe", None),
        ({**chat_body("x"), "temprature": 1.0}, "temprature"),
        ({**chat_body("x"), "model": "good", "num_draft_tokens": 3}, "num_draft_tokens"),
        ({**chat_body("x"), "model": "good", "logit_bias": {"99999": 1.0}}, "logit_bias"),
    ],
    ids=str,
)
def test_a_bad_request_is_a_400_that_names_the_field(
    hardened: Node, body: object, param: str | None
) -> None:
    """One of the reader, the schema, the card and the runner; each has tests of its own."""
    reply = hardened.call("POST", CHAT, body)
    assert reply.status == 400, reply
    error = reply.body["error"]
    assert error["type"] == "invalid_request_error"
    assert isinstance(error["code"], str)
    assert error["message"]
    if param is not None:
        assert error["param"] == param
    assert good_answer(hardened)


def test_a_prompt_over_the_context_is_refused_by_its_token_count(hardened: Node) -> None:
    reply = hardened.call("POST", CHAT, chat_body("ocean " * 5000, model="good"))
    assert (reply.status, reply.body["error"]["code"]) == (400, "context_length_exceeded")
    assert "4096" in reply.body["error"]["message"]
    assert good_answer(hardened)


def test_an_unknown_model_is_a_404_with_the_nearest_ids(hardened: Node) -> None:
    reply = hardened.call("POST", CHAT, chat_body("x", model="goood"))
    assert (reply.status, reply.body["error"]["code"]) == (404, "model_not_found")
    assert "good" in reply.body["error"]["message"]
    assert good_answer(hardened)


def test_a_corrupted_checkpoint_is_named_with_its_file(hardened: Node) -> None:
    reply = hardened.call("POST", CHAT, chat_body("x", model="corrupted"))
    assert reply.status >= 500, reply
    assert reply.body["error"]["code"] == "invalid_checkpoint"
    assert "model-00003-of-00003.safetensors" in reply.body["error"]["message"]
    assert good_answer(hardened)


def test_a_card_with_max_k_below_default_k_is_named_with_the_remedy(hardened: Node) -> None:
    reply = hardened.call("POST", CHAT, chat_body("x", model="backwards"))
    assert reply.status >= 500, reply
    assert reply.body["error"]["code"] == "invalid_card"
    assert "max_k" in reply.body["error"]["message"]
    assert good_answer(hardened)
    listed = {m["id"]: m for m in hardened.call("GET", "/v1/models").body["data"]}
    assert "max_k" in listed["backwards"]["error"]


def test_a_head_in_the_files_drafts_without_a_declaration(hardened: Node) -> None:
    stats = hardened.chat("Who are you?", model="undeclared", max_tokens=8)["generation_stats"]
    assert (stats["drafter_kind"], stats["num_draft_tokens"]) == ("native_mtp", 1)


def test_a_card_in_a_models_folder_turns_native_mtp_on(hardened: Node) -> None:
    stats = hardened.chat("Who are you?", model="good", max_tokens=8)["generation_stats"]
    assert (stats["drafter_kind"], stats["num_draft_tokens"]) == ("native_mtp", 1)


def test_a_parked_head_is_told_wherever_its_model_is_shown(hardened: Node) -> None:
    def shown() -> dict[str, Any]:
        models = hardened.call("GET", "/v1/models").body["data"]
        return next(m["native_mtp"] for m in models if m["id"] == "nan-head")

    assert (shown()["enabled"], shown()["parked"]) == (True, False)
    asked = {"model": "nan-head", "max_tokens": 8}
    answer = hardened.chat("Who are you?", return_token_ids=True, **asked)
    assert answer["choices"][0]["token_ids"] == ORACLE_IDS[:8]
    assert answer["generation_stats"]["head_parked"]
    eventually(lambda: shown()["parked"], 60)  # its runner tells of itself now and then
    assert (shown()["enabled"], shown()["weights"]) == (False, "found")
    assert "not finite at position" in shown()["reason"]
    [placed] = [
        p for p in hardened.call("GET", "/v1/placements").body["data"] if p["model"] == "nan-head"
    ]
    assert placed["drafting"]["drafter_kind"] == "none"
    assert placed["drafting"]["reason"] == shown()["reason"]


def test_an_unknown_placement_is_a_404(hardened: Node) -> None:
    reply = hardened.call("DELETE", "/v1/placements/p-nothing")
    assert (reply.status, reply.body["error"]["code"]) == (404, "placement_not_found")


def test_more_nodes_than_there_are_is_a_400_that_says_so(hardened: Node) -> None:
    reply = hardened.call("POST", "/v1/placements", {"model": "demo", "min_nodes": 2})
    assert (reply.status, reply.body["error"]["param"]) == (400, "min_nodes")
    assert good_answer(hardened)


@pytest.mark.parametrize(("flag", "error"), [("--port", "--port"), ("--grpc-port", "--grpc-port")])
def test_a_port_in_use_ends_the_start_with_the_next_free_one(
    tmp_path: Path, flag: str, error: str
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        process = start_process(tmp_path / "n", "--no-mdns", flag, str(port))
        assert process.wait(READY_WITHIN_S) == 2
        text = (tmp_path / "n" / "log").read_text()
    assert f"port {port}" in text
    assert error in text
    assert "Traceback" not in text


@pytest.mark.parametrize(
    ("flags", "env", "words"),
    [
        (("--dtype", "int8"), {}, "--dtype"),
        (("--host", "0.0.0.0"), {}, "EXO_API_KEY"),
        ((), {"EXO_NATIVE_MTP_ENABLED": "perhaps"}, "EXO_NATIVE_MTP_ENABLED"),
        ((), {"EXO_CLUSTER_KEY": "short"}, "EXO_CLUSTER_KEY"),
        (("--models-dir", "/nonexistent"), {}, "--models-dir"),
    ],
    ids=str,
)
def test_a_bad_setting_ends_the_start_with_its_name(
    tmp_path: Path, flags: tuple[str, ...], env: dict[str, str], words: str
) -> None:
    process = start_process(tmp_path / "n", *flags, env=env)
    assert process.wait(READY_WITHIN_S) == 2
    text = (tmp_path / "n" / "log").read_text()
    assert words in text
    assert "Traceback" not in text


def test_a_second_start_on_the_same_data_folder_names_the_first(hardened: Node) -> None:
    second = start_process(hardened.data_dir, log=hardened.data_dir / "second.log")
    assert second.wait(READY_WITHIN_S) == 2
    text = (hardened.data_dir / "second.log").read_text()
    assert str(hardened.process.pid) in text
    assert good_answer(hardened)


def test_prompts_and_keys_never_reach_the_log(hardened: Node) -> None:
    canary = "xylophone-canary"
    _ = hardened.chat(f"Say {canary}", model="good", max_tokens=4)
    _ = hardened.call("POST", CHAT, {**chat_body(canary), "temperature": 9})
    eventually(lambda: hardened.log.stat().st_size > 0, 60)
    log = hardened.log.read_text()
    assert canary not in log
    assert (hardened.data_dir / "cluster.key").read_text().strip() not in log


def test_a_prompt_of_megabytes_is_refused_and_the_runner_stays(hardened: Node) -> None:
    assert good_answer(hardened)
    pids = {stage["pid"] for stage in hardened.stages()}
    reply = hardened.call("POST", CHAT, chat_body("a " * 2_200_000, model="good"))
    assert (reply.status, reply.body["error"]["code"]) == (400, "context_length_exceeded")
    assert {stage["pid"] for stage in hardened.stages()} == pids
    reply = hardened.call("POST", CHAT, chat_body("a " * 4_500_000, model="good"))
    assert (reply.status, reply.body["error"]["code"]) == (413, "request_too_large")
    assert good_answer(hardened)
