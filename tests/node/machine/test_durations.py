"""Durations as people and Ollama's clients write them."""

import math

import pytest

from exo_node.node.machine.setting_values import duration_s


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (300, 300.0),
        ("300", 300.0),
        (0, 0.0),
        ("0s", 0.0),
        (2.5, 2.5),
        ("5m", 300.0),
        ("1h30m", 5400.0),
        ("300ms", 0.3),
        (" 24H ", 86_400.0),
        (-1, math.inf),
        ("-1", math.inf),
        ("-1m", math.inf),
        ("never", math.inf),
        ("99999d", math.inf),
    ],
)
def test_a_duration_in_any_of_its_spellings(text: str | float, seconds: float) -> None:
    assert duration_s(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "five", "5 m", "5w", "m5", "1e9", "nan", "-", "5m!", "٣"])
def test_what_is_none_is_refused_with_the_remedy(text: str) -> None:
    with pytest.raises(ValueError, match="no duration; give seconds"):
        _ = duration_s(text)
