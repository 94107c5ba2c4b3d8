"""A person's cards: over those that ship, over the files, and a bad one beside good ones."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants
from models import make_checkpoint

from exo_node.node.store.library import ModelLibrary
from exo_node.placement.ids import ModelId

QWEN = ModelId("Qwen/Qwen3.6-27B")


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelLibrary]:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "cards").mkdir()
    make_checkpoint(tmp_path / "models" / "tiny", "llama")
    yield ModelLibrary((tmp_path / "models",), offline=True, cards=tmp_path / "cards")


def test_a_card_changes_one_that_ships_and_one_of_the_disk(
    library: ModelLibrary, tmp_path: Path
) -> None:
    before = library.catalogue()[QWEN].card
    (tmp_path / "cards" / "a.toml").write_text(f'id = "{QWEN}"\ncontext_length = 1000\n')
    (tmp_path / "cards" / "b.toml").write_text('id = "tiny"\ncontext_length = 99\n')
    after = library.catalogue()[QWEN].card
    assert after == before.model_copy(update={"context_length": 1000})
    assert library.get(QWEN).card == after
    assert library.scan()[ModelId("tiny")].card.context_length == 99
    (tmp_path / "cards" / "b.toml").unlink()
    assert library.scan()[ModelId("tiny")].card.context_length != 99


def test_a_new_model_needs_a_whole_card(library: ModelLibrary, tmp_path: Path) -> None:
    facts = library.catalogue()[QWEN].card.model_dump(
        include={"model_type", "num_layers", "hidden_size", "vocab_size", "num_attention_layers",
                 "num_key_value_heads", "head_dim", "context_length", "weight_bytes"}
    )  # fmt: skip
    lines = [f"{name} = {value!r}" for name, value in facts.items()]
    card = tmp_path / "cards" / "new.toml"
    card.write_text("\n".join(['id = "me/new"', 'repository = "me/new"', *lines]))
    assert library.get(ModelId("me/new")).card.num_layers == 64
    card.write_text("\n".join(['id = "me/new"', *lines[:-1]]))
    _ = library.scan()
    _ = library.catalogue()
    _ = library.scan()
    assert "weight_bytes is missing" in library.broken[ModelId("new.toml")].message


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("context_length = 5", "id is missing"),
        ("id = = 3", "line 1"),
        (f'id = "{QWEN}"\ncontext_lenght = 5', "did you mean context_length?"),
        (f'id = "{QWEN}"\ncontext_length = "long"', "context_length is 'long'"),
    ],
)
def test_a_bad_card_names_file_and_field_and_leaves_the_others_in_use(
    library: ModelLibrary, tmp_path: Path, text: str, says: str
) -> None:
    (tmp_path / "cards" / "bad.toml").write_text(text)
    (tmp_path / "cards" / "good.toml").write_text('id = "demo"\ncontext_length = 64\n')
    assert library.scan()[ModelId("demo")].card.context_length == 64
    message = library.broken[ModelId("bad.toml")].message
    assert says in message and "bad.toml" in message
    assert library.catalogue()[QWEN].card.context_length == 262_144
