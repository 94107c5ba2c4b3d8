"""Variations within the layouts of MTP heads, and ambiguous heads, on headers alone."""

import dataclasses

import pytest
from header_files import Entry, checkpoint_of, headers, reason, whole_head


@pytest.mark.parametrize("name", ["qwen3.6-27b", "deepseek-v3"])
@pytest.mark.parametrize("key", ["mtp_num_hidden_layers", "num_nextn_predict_layers"])
def test_a_head_of_several_layers_is_refused_by_its_field(name: str, key: str) -> None:
    fields = dict.fromkeys(("mtp_num_hidden_layers", "num_nextn_predict_layers"), 0) | {key: 2}
    text = reason(checkpoint_of(name, changes=fields))
    assert f"({key} = 2 in config.json)" in text and "Remove [native_mtp]" in text


def renamed(name: str, old: str, new: str) -> list[Entry]:
    entries = headers(name).entries
    return [dataclasses.replace(e, name=e.name.replace(old, new)) for e in entries]


def test_layers_past_the_last_are_no_head_unless_they_say_so() -> None:
    plain = [e for e in headers("glm-4.6").entries if "_proj.weight" in e.name]
    plain = [e for e in plain if "eh_proj" not in e.name]
    text = reason(checkpoint_of("glm-4.6", plain, {"num_nextn_predict_layers": 0}))
    assert text == "the checkpoint has no MTP head, and config.json declares none."


def test_a_nextn_head_needs_no_claim() -> None:
    assert (
        whole_head(checkpoint_of("deepseek-v3", changes={"num_nextn_predict_layers": None})).layout
        == "nextn"
    )


def test_two_heads_of_different_layouts_are_ambiguous() -> None:
    fc = Entry("mtp.safetensors", "mtp.fc.weight", "BF16", (5120, 10240))
    text = reason(checkpoint_of("glm-4.6", [*headers("glm-4.6").entries, fc]))
    assert "mtp.fc.weight" in text and "model.layers.92." in text and "Remove the file" in text


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_a_nextn_head_is_found_under_a_multimodal_models_prefix(prefix: str) -> None:
    head = whole_head(checkpoint_of("glm-4.5-air", renamed("glm-4.5-air", "model.", prefix)))
    assert head.tensors["eh_proj.weight"].name == f"{prefix}layers.46.eh_proj.weight"
