"""Two stages that a loss brought onto one node part again, on real nodes, between answers."""

from pathlib import Path

import psutil
import pytest
from laboratory import WHOLE_WITHIN_S, Laboratory, laboratory
from nodes import eventually
from trials import oracle_question

pytestmark = pytest.mark.timeout(900)


def holders(lab: Laboratory) -> list[str]:
    """The nodes of a placement that is ready, in the order of its stages."""
    placement = lab.placement()
    ready = placement is not None and placement["status"] == "ready"
    return [place.node for place in lab.places()] if ready else []


def test_a_stage_goes_back_to_a_node_that_was_gone_for_a_moment(tmp_path: Path) -> None:
    with laboratory(tmp_path, nodes=3) as lab:
        planned = holders(lab)
        lost = next(place for place in lab.places() if place.node != lab.head())
        node = psutil.Process(lab.node(lost.node).process.pid)
        node.suspend()
        try:
            psutil.Process(lost.pid).kill()
            eventually(lambda: len(set(holders(lab))) == 2, WHOLE_WITHIN_S)
        finally:
            node.resume()
        eventually(lambda: holders(lab) == planned, WHOLE_WITHIN_S)
        placement = lab.placement()
        assert (placement["moved"], placement["progress"]) == (None, "")
        answer = oracle_question("Tell me a story.").answered_by(lab)
        assert answer.ids, "those of the oracle"
        assert len({place.pid for place in lab.places()}) == 3
