import json
import os
from pathlib import Path

import pytest

from exo_node.placement.card import ModelCard
from exo_node.placement.errors import InvalidCard
from exo_node.placement.ids import ModelId
from exo_node.placement.library import derive_card, nearest_ids, packaged_cards, read_card_file

ROOT = Path(__file__).parents[3]
DEMO = ROOT / "shard" / "models" / "demo"
KNOWN = [ModelId(name) for name in ("demo", "Qwen/Qwen3.6-27B", "Qwen/Qwen3.6-35B-A3B", "llama")]


def test_cards_with_a_head_draft_once_and_the_dense_27b_twice() -> None:
    drafts = {
        card.id: (card.native_mtp.default_k, card.native_mtp.max_k)
        for card in packaged_cards().values()
        if card.native_mtp is not None
    }
    twice = {"demo", "Qwen/Qwen3.5-27B", "Qwen/Qwen3.6-27B", "Qwen/Qwen3.8-27B"}
    once = {
        *(f"Qwen/Qwen3-Next-80B-A3B-{kind}" for kind in ("Instruct", "Thinking")),
        *(f"Qwen/Qwen3.5-{size}" for size in ("4B", "9B", "35B-A3B")),
        "Qwen/Qwen3.6-35B-A3B",
        "Qwen/Qwen3.8-Flash-Next",
        *(f"deepseek-ai/DeepSeek-{name}" for name in ("R1", "V3", "V3.1")),
        *(f"zai-org/GLM-{name}" for name in ("4.5", "4.5-Air", "4.6", "4.7")),
    }
    assert drafts == dict.fromkeys(twice, (2, 7)) | dict.fromkeys(once, (1, 7))


def test_a_card_is_keyed_by_its_id_and_filed_under_it() -> None:
    cards = packaged_cards()
    assert all(key == card.id for key, card in cards.items())
    filed = {path.stem.replace("--", "/") for path in (ROOT / "placement/cards").glob("*.toml")}
    assert filed == set(cards)


def test_the_demo_card_says_what_its_checkpoint_says() -> None:
    card = packaged_cards()[ModelId("demo")]
    config = json.loads((DEMO / "config.json").read_text())
    index = json.loads((DEMO / "model.safetensors.index.json").read_text())
    declared = {"native_mtp": card.native_mtp, "sampling": card.sampling}
    assert card == derive_card(card.id, config, index["metadata"]["total_size"], declared)
    generation = json.loads((DEMO / "generation_config.json").read_text())
    for field in ("temperature", "top_p", "top_k"):
        assert getattr(card.sampling, field) == generation[field]


@pytest.mark.parametrize(
    ("model", "billions"),
    [
        # By the names, and by the publishers' README for those that do not say.
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", 3),
        ("Qwen/Qwen3.5-35B-A3B", 3),
        ("Qwen/Qwen3.6-35B-A3B", 3),
        ("deepseek-ai/DeepSeek-V3", 37),
        ("zai-org/GLM-4.5-Air", 12),
        ("zai-org/GLM-4.6", 32),
    ],
)
def test_a_mixtures_card_reads_about_the_parameters_that_are_published(
    model: str, billions: int
) -> None:
    card = packaged_cards()[ModelId(model)]
    active = (card.num_layers * card.active_layer_bytes + card.embedding_bytes) / 2
    assert billions * 1e9 < active < 1.2 * billions * 1e9  # a token's embedding, the ends, rounding


def test_a_persons_card_is_read_as_written(tmp_path: Path) -> None:
    path = tmp_path / "exo-card.toml"
    path.write_text("context_length = 2048\n[native_mtp]\ndefault_k = 1\nmax_k = 2\n")
    assert read_card_file(path) == {
        "context_length": 2048,
        "native_mtp": {"default_k": 1, "max_k": 2},
    }


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"a = 1\nb = = 2\n", "line 2"),
        (b"a = 1\na = 2\n", "line 2"),
        (b"[native_mtp\n", "line 1"),
        (b"a = 'open", "end of document"),
        (b"a = 1\nb = '\xff'\n", "line 2"),
        (b"a = " + b"[" * 20_000, "mend the TOML"),
        (b"a = " + b"9" * 5_000, "mend the TOML"),
        (b"a = 1 " + b"#" * 70_000, "a card is a screenful"),
    ],
)
def test_a_broken_card_names_file_and_line(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "exo-card.toml"
    path.write_bytes(content)
    with pytest.raises(InvalidCard) as caught:
        read_card_file(path)
    assert caught.value.message.startswith(str(path))
    assert says in caught.value.message


def test_a_folder_or_pipe_in_place_of_a_card_is_refused(tmp_path: Path) -> None:
    pipe = tmp_path / "exo-card.toml"
    os.mkfifo(pipe)
    for path in (pipe, tmp_path, tmp_path / "absent.toml"):
        with pytest.raises(InvalidCard, match="is not a file"):
            read_card_file(path)


@pytest.mark.parametrize(
    ("unknown", "expected"),
    [
        ("Demo", ["demo"]),
        ("qwen3.6", ["Qwen/Qwen3.6-27B", "Qwen/Qwen3.6-35B-A3B"]),
        ("Qwen3.6-27b", ["Qwen/Qwen3.6-27B"]),
        ("mlx-community/Qwen3.6-27B-4bit", ["Qwen/Qwen3.6-27B"]),
        ("a-person-with-a-long-name/qwen3.6-27b-own-mix-GGUF-Q4_K_M", ["Qwen/Qwen3.6-27B"]),
        ("lama", ["llama"]),
        ("Qwen/NAME", []),
        ("zzzz", []),
        ("", []),
    ],
)
def test_the_nearest_ids_are_those_a_person_meant(unknown: str, expected: list[str]) -> None:
    assert nearest_ids(unknown, KNOWN)[: len(expected) or None] == expected


def test_no_more_ids_than_asked_and_an_endless_name_is_cut() -> None:
    assert len(nearest_ids("qwen", KNOWN, n=1)) == 1
    assert nearest_ids("q" * 10_000_000, KNOWN) == []
    assert nearest_ids("q" * 300 + "demo", KNOWN) == []


def test_the_committed_schema_is_the_cards() -> None:
    """`python -c "import json; from exo_node.placement.card import ModelCard;
    print(json.dumps(ModelCard.model_json_schema(), indent=1))" > docs/card.schema.json`"""
    committed = json.loads((ROOT / "docs" / "card.schema.json").read_text())
    assert committed == json.loads(json.dumps(ModelCard.model_json_schema()))


def test_published_quantisations_are_smaller_than_their_original_and_named_once() -> None:
    cards = packaged_cards()
    names = [variant.repository for card in cards.values() for variant in card.variants]
    assert len(names) == len(set(names)) and not set(names) & set(cards)
    for card in cards.values():
        plain = [v.weight_bytes for v in card.variants if v.bits < (card.quantization or 16)]
        assert all(size is None or size < card.weight_bytes for size in plain)
        for variant in card.variants:
            quantised = card.as_variant(variant)
            assert (quantised.id, quantised.quantization) == (variant.repository, variant.bits)
            assert (quantised.native_mtp is not None) == variant.head
            assert 0.3 < quantised.weight_bytes * 16 / card.weight_bytes / variant.bits < 5
