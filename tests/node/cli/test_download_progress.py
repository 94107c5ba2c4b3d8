"""The line that shows how far a download is, over a clock that stands still."""

from dataclasses import dataclass

import pytest

from exo_node.node.cli.get_models import ProgressLine
from exo_node.node.store.transfers import Progress


@dataclass
class Clock:
    now: float = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("before", "expected"),
    [(0, "30.0 MB/s, 13 s left"), (500, "5.0 MB/s, 80 s left")],
    ids=["from the beginning", "resumed"],
)
def test_the_speed_of_a_download_is_that_of_the_bytes_that_came_since_its_start(
    before: int, expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock()
    monkeypatch.setattr("exo_node.node.cli.get_models.time", clock)
    line = ProgressLine("owner/large")
    for at, megabytes in ((0.0, before), (20.0, 600)):
        clock.now = 1000.0 + at
        line.show(Progress(megabytes * 10**6, 10**9, "model.safetensors"))
    assert (
        capsys.readouterr().err.splitlines()[-1]
        == f"owner/large: 0.60 of 1.00 GB (60 %), {expected}"
    )
