"""LoadStage of a member: names that no head uses are refused before a load starts."""

import asyncio
from typing import Any

import pytest

from exo_node.node.rpc.control_server import ControlService
from exo_node.placement.errors import InvalidRequest
from exo_node.proto import peer_pb2 as pb

GOOD: dict[str, Any] = {
    "placement": "p-1234abcd",
    "model": "owner/model",
    "stage": 0,
    "num_stages": 1,
    "first_layer": 0,
    "end_layer": 4,
    "num_layers": 4,
    "dtype": "bfloat16",
}


class _Node:
    """Accepts every load."""

    def __init__(self) -> None:
        self.specs: list[pb.StageSpec] = []

    async def load_stage(self, spec: pb.StageSpec, progress: Any) -> pb.LoadReady:
        self.specs.append(spec)
        return pb.LoadReady(port=1)


def load(**changes: Any) -> _Node:
    node: Any = _Node()
    context: Any = None

    async def run() -> None:
        spec = pb.StageSpec(**{**GOOD, **changes})
        async for _ in ControlService(node).LoadStage(spec, context):
            pass

    asyncio.run(run())
    return node


def test_a_heads_spec_is_loaded() -> None:
    assert [spec.placement for spec in load().specs] == ["p-1234abcd"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("placement", "../../x"),
        ("placement", "a\nb"),
        ("placement", ""),
        ("placement", "x" * 65),
        ("model", "a\x1b[2Jb"),
        ("model", ""),
        ("dtype", "int3"),
        ("dtype", ""),
        ("stage", 1),
        ("end_layer", 5),
        ("first_layer", 4),
    ],
)
def test_a_spec_that_no_head_writes_is_refused_by_its_field(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as refused:
        _ = load(**{field: value})
    assert refused.value.param == field.replace("first", "end")
