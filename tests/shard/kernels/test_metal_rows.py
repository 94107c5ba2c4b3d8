"""Which numbers of rows have the same bits on Metal, by MLX's own kernels, for the shapes of the
shipped cards: what `docs/mtp.md` says of Macs rests on these sets."""

import json
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import header_files
import pytest
from metal_texts import DISPATCH_OF, built, row_sets

CONFIGS = Path(__file__).parents[2] / "card_configs.json"
OUTPUTS = 16


def test_the_choices_of_kernels_were_read_in_this_mlx() -> None:
    assert version("mlx") == DISPATCH_OF, (
        "read in the library's sources how it chooses kernels by rows, and change "
        "tests/emulator/metal_*.cpp and metal_texts.DISPATCH_OF"
    )


@cache
def configs() -> list[tuple[dict[str, Any], str]]:
    """The text configs of the shipped cards' models, each with the format of its products."""
    found: list[tuple[dict[str, Any], str]] = []
    for card in json.loads(CONFIGS.read_text()).values():
        config = card["config"]
        quantised: dict[str, Any] = config.get("quantization") or {}
        mode = quantised.get("mode") or "affine"
        group, bits = quantised.get("group_size", 64), quantised.get("bits", 4)
        found.append((config.get("text_config", config), f"{mode}-{group}-{bits}"))
    for name in header_files.NAMES:
        config = json.loads((header_files.HEADERS / f"{name}.json").read_text())["config"]
        found.append((config.get("text_config", config), "dense"))
    return found


def widths() -> list[int]:
    """The inputs of most linear layers without quantisation."""
    return sorted({config["hidden_size"] for config, format in configs() if format == "dense"})


def quantised() -> list[tuple[str, int]]:
    """(format, inputs) of the quantised linear layers, and formats of other publishers."""
    names = ("hidden_size", "intermediate_size", "moe_intermediate_size")
    found = {
        (format, inputs)
        for config, format in configs()
        for name in names
        if format != "dense" and (inputs := config.get(name))
    }
    found |= {("affine-64-8", 2880), ("mxfp8-32-8", 6144), ("nvfp4-16-4", 1024)}
    return sorted(found | {(f"affine-{format}", 1024) for format in ("64-6", "128-4", "32-8")})


def heads() -> set[tuple[int, int]]:
    """(size, query heads of a key head), for sizes that few rows have a kernel for."""
    found = set[tuple[int, int]]()
    for config, _ in configs():
        queries, keys = config.get("num_attention_heads", 1), config.get("num_key_value_heads", 1)
        size = config.get("head_dim") or config["hidden_size"] // queries
        if size in (64, 128, 256) and 1 < (group := queries // keys) <= 16:
            found.add((size, group))
    return found


@pytest.mark.parametrize(("format", "inputs"), quantised())
def test_two_to_twelve_rows_of_a_quantised_product_agree_from_the_m3_on(
    format: str, inputs: int
) -> None:
    program = built("metal_products")
    assert row_sets(program, format, inputs, OUTPUTS, 1, 12) == "1 | 2-12"
    if format.startswith("affine"):
        assert row_sets(program, format, inputs, OUTPUTS, 0, 5) == "1-5", "before the M3"


@pytest.mark.parametrize("inputs", [64, 128])
def test_products_of_few_inputs(inputs: int) -> None:
    sets = row_sets(built("metal_products"), "affine-64-4", inputs, 64, 1, 12)
    assert sets == ("1-12" if inputs == 128 else "1 | 2-12")


@pytest.mark.parametrize("outputs", [1, 13])
def test_odd_outputs_change_no_set(outputs: int) -> None:
    assert row_sets(built("metal_products"), "affine-64-4", 1024, outputs, 1, 12) == "1 | 2-12"


@pytest.mark.parametrize("inputs", widths())
def test_rows_of_a_product_in_16_bits_from_the_m3_on(inputs: int) -> None:
    program = built("metal_dense")
    assert row_sets(program, inputs, 68, 15) == "1 | 2-5 | 6-15"
    assert row_sets(program, inputs, 32, 15) == "1 | 2-15", "a router"


def attention(gpu: str, size: int, group: int, position: int) -> str:
    """The sets of a call's rows after `position` keys; n is the most that was tried."""
    most = min(5, 32 // group)
    program = built("metal_attention")
    return row_sets(program, size, group, position, most, gpu).replace(str(most), "n")


SHAPES = sorted({*heads(), (256, 6), (64, 2)})


@pytest.mark.parametrize(("size", "group"), SHAPES)
def test_rows_of_attention_in_one_pass_agree_and_in_two_by_group(size: int, group: int) -> None:
    assert attention("s", size, group, 200) == "1-n"
    on_max = {2: "1-2 | 3-n", 3: "1 | 2-n", 4: "1 | 2-n"}.get(group, "1-n")
    assert attention("s", size, group, 1100) == on_max


@pytest.mark.parametrize("group", sorted({group for _, group in SHAPES}))
def test_rows_of_attention_on_other_chips(group: int) -> None:
    assert attention("d", 64, group, 1100) == "1-n"
    assert attention("g", 64, group, 1100) == "1-n"
    assert attention("g", 64, group, 4200) == ("1 | 2-n" if group < 4 else "1-n")


@pytest.mark.parametrize(("size", "group"), [(64, 8), (128, 8), (128, 12), (128, 16)])
def test_one_row_has_a_kernel_of_its_own_from_8192_keys(size: int, group: int) -> None:
    assert attention("s", size, group, 8200).startswith("1 | ")


@pytest.mark.parametrize(("gpu", "position"), [("s", 1020), ("d", 1020), ("g", 4092), ("s", 8190)])
def test_rows_of_calls_across_a_border_differ(gpu: str, position: int) -> None:
    assert [attention(gpu, 64, 6, position + by) for by in (-40, 40)] == ["1-n", "1-n"]
    assert attention(gpu, 64, 6, position) != "1-n"
