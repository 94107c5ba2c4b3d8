"""A quantised model whose prompts are unpacked on a CPU: its answers do not depend on how a prompt
meets others, or where the model is cut."""

import mlx.core as mx
import pytest
from mlx import nn
from zoo import tiny_config
from zoo_runs import as_two_stages, on_one_node, small, together_on_one_node

from exo_node.shard.kernels.unpacked import unpack_prompts

CHUNK = 256
TOKENS = 24

pytestmark = pytest.mark.skipif(mx.default_device() != mx.cpu, reason="of a CPU")


def prompt(rows: int) -> list[int]:
    return [(37 * i + 11 * rows) % 90 + 1 for i in range(rows)]


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_next"])
def test_answers_are_those_of_prompts_alone_and_of_two_stages(kind: str) -> None:
    config = tiny_config(kind)
    model = small(config)
    nn.quantize(
        model,
        group_size=32,
        bits=4,
        class_predicate=lambda _, m: type(m) is nn.Linear and m.weight.shape[1] % 32 == 0,
    )
    assert unpack_prompts([model]) > 3
    prompts = [prompt(rows) for rows in (300, 40, 65, 64, 40)]
    alone = [on_one_node(model, CHUNK, TOKENS, each) for each in prompts]
    assert together_on_one_node(model, prompts, CHUNK, TOKENS) == alone
    assert len(set(map(tuple, alone))) > 2
    stages = [as_two_stages(model, config, 1, CHUNK, TOKENS, each) for each in prompts[:3]]
    assert stages == alone[:3]
