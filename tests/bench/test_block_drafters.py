"""`bench/block_drafters.py`: the published sizes, and the acceptance by which a round pays."""

import pytest
from block_drafters import acceptance_to_pay, published_config
from shapes import SHAPES


def test_drafters_have_the_published_sizes_and_fit_other_shapes() -> None:
    first, second = (published_config(name, SHAPES["27B"]) for name in ("dflash", "dflash2"))
    assert first["dflash_config"]["target_layer_ids"] == [1, 16, 31, 46, 61]
    assert second["dflash_config"]["target_layer_ids"] == [5, 19, 33, 47, 61]
    assert (first["block_size"], second["block_size"]) == (16, 8)
    for each in (first, second):
        assert each["dflash_config"]["mask_token_id"] == 248070
        assert (each["num_attention_heads"], each["num_key_value_heads"]) == (32, 8)
    tiny = published_config("dflash2", SHAPES["tiny"])["dflash_config"]
    assert len({*tiny["target_layer_ids"]}) == 5 and max(tiny["target_layer_ids"]) < 8


@pytest.mark.parametrize(
    ("steps", "k", "share"), [(1.0, 3, 0.0), (4.0, 3, 1.0), (1.75, 2, 0.5), (4.01, 3, None)]
)
def test_a_round_pays_where_its_tokens_are_its_steps(
    steps: float, k: int, share: float | None
) -> None:
    needed = acceptance_to_pay(steps, k)
    assert needed == (share if share is None else pytest.approx(share, abs=1e-3))
