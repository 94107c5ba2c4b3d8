"""The models on disk that one node and a cluster list."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from hub import COMMIT
from models import DEMO
from nodes import Node, eventually, free_ports, node

KEY = "c" * 32
PUBLISHED = {"value": 0.7, "source": "generation_config.json"}
"""The temperature of a model without a card, by its files."""


def in_cache(hub: Path, repository: str) -> Path:
    folder = hub / f"models--{repository.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(COMMIT)
    snapshot = Path(shutil.copytree(DEMO, folder / "snapshots" / COMMIT))
    with (snapshot / "chat_template.jinja").open("a") as template:
        _ = template.write("{%- if tools %}{{ tools }}<tool_call>{% endif %}")
    return snapshot


def listed(running: Node) -> dict[str, Any]:
    return {each["id"]: each for each in running.call("GET", "/v1/models").body["data"]}


def test_a_cached_model_is_listed_loaded_and_found(tmp_path: Path) -> None:
    """A model that arrives while the node runs is listed without a restart."""
    hub = tmp_path / "hub"
    in_cache(hub, "me/demo2")
    with node(tmp_path / "n", "--no-mdns", env={"HF_HUB_CACHE": str(hub)}) as running:
        before = listed(running)
        assert before.keys() == {"demo", "me/demo2"}
        entry = before["me/demo2"]
        assert (entry["loaded"], entry["downloaded"], entry["fits"]["nodes"]) == (False, True, 1)
        assert entry["size_bytes"] > 30_000_000
        assert "head found" in entry["mtp"]
        cards = running.call("GET", "/v1/models?catalog=1").body["data"]
        ranks = [card["recommended"] for card in cards if card["recommended"]]
        assert ranks and sorted(ranks) == list(range(1, len(ranks) + 1))
        assert all(card["fits"]["nodes"] for card in cards if card["recommended"])
        answer = running.chat("Who are you?", model="me/demo2", max_tokens=4)
        assert answer["generation_stats"]["drafter_kind"] == "native_mtp"
        assert listed(running)["me/demo2"]["loaded"]
        assert running.call("GET", "/v1/models/me/demo2").body["loaded"]
        in_cache(hub, "me/later")
        assert "me/later" in listed(running)
        (hub / "models--me--later" / "snapshots" / COMMIT / "config.json").unlink()
        assert "me/later" not in listed(running)


@pytest.mark.parametrize("at", ["head", "follower"])
def test_a_list_has_the_models_of_every_node(tmp_path: Path, at: str) -> None:
    ports = free_ports(2)
    shared = ("--no-mdns", "--cluster-key-file", str(tmp_path / "key"))
    (tmp_path / "key").write_text(KEY)
    in_cache(tmp_path / "hub-a", "me/only-a")
    in_cache(tmp_path / "hub-b", "me/only-b")
    with (
        node(
            tmp_path / "a", *shared, "--name", "a", "--grpc-port", str(ports[0]),
            env={"HF_HUB_CACHE": str(tmp_path / "hub-a")},
        ) as a,
        node(
            tmp_path / "b", *shared, "--name", "b", "--peer", f"127.0.0.1:{ports[0]}",
            env={"HF_HUB_CACHE": str(tmp_path / "hub-b")},
        ) as b,
    ):  # fmt: skip
        head_first = (a, b) if a.itself()["head"] else (b, a)
        door = head_first[at == "follower"]
        both = {"demo", "me/only-a", "me/only-b"}
        eventually(lambda: listed(door).keys() == both, 60)
        models = listed(door)
        assert models["me/only-a"]["nodes"] == ["a"]
        assert models["me/only-b"]["nodes"] == ["b"]
        assert sorted(models["demo"]["nodes"]) == ["a", "b"]
        for model in ("me/only-a", "me/only-b"):
            assert models[model]["capabilities"] == ["tools"], model
            assert models[model]["sampling"]["temperature"] == PUBLISHED, model
            show = door.call("POST", "/api/show", {"model": model}).body
            assert "temperature                    0.7\n" in show["parameters"]
            assert show["capabilities"] == ["completion", "tools"]
            assert show["details"]["family"] == "qwen3_5"
        assert len({models[model]["digest"] for model in ("me/only-a", "me/only-b")}) == 1
        sizes = {models[model]["size_bytes"] for model in ("me/only-a", "me/only-b")}
        assert len(sizes) == 1 and sizes.pop() > 30_000_000
        other = "me/only-b" if door is a else "me/only-a"
        answer = door.chat("Who are you?", model=other, max_tokens=2, temperature=None, top_p=0.5)
        sampling = answer["generation_stats"]["sampling"]
        assert sampling["temperature"] == PUBLISHED
        assert sampling["top_p"] == {"value": 0.5, "source": "request"}
        assert sampling["min_p"] == {"value": 0.0, "source": "default"}
