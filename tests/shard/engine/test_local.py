"""The local verifier: which forwards it makes of what it is asked."""

from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx
import pytest
from mlx import nn
from mlx_lm.generate import generate_step
from mlx_lm.models import gpt_oss
from mlx_lm.models.cache import KVCache, make_prompt_cache
from tables import EndAt

from exo_node.mtp.drafters import NoDrafter
from exo_node.mtp.loop import Generation
from exo_node.mtp.sampler import Sampler
from exo_node.mtp.seams import Want, as_row
from exo_node.mtp.task import Task
from exo_node.mtp.types import Round, Sampling
from exo_node.shard.engine.local import LocalVerifier, WholeTarget

V = 8
GPT_OSS = gpt_oss.ModelArgs(
    num_hidden_layers=2,
    num_local_experts=2,
    num_experts_per_tok=1,
    vocab_size=64,
    hidden_size=32,
    intermediate_size=32,
    head_dim=16,
    num_attention_heads=2,
    num_key_value_heads=1,
    sliding_window=8,
    rope_scaling={"rope_type": "default"},
    layer_types=["sliding_attention", "full_attention"],
)


class Counting(nn.Module):
    """A model that notes how many rows each forward had."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: list[nn.Module] = []
        self.forwards: list[int] = []

    def __call__(self, ids: mx.array, cache: Any) -> mx.array:
        self.forwards.append(ids.shape[1])
        return mx.zeros((1, ids.shape[1], V))


@pytest.mark.parametrize(
    ("want", "forwards"),
    [("none", [64]), ("last", [63, 1]), ("all", [64])],
)
def test_a_chunk_is_read_in_one_forward_unless_its_last_row_alone_has_logits(
    want: Want, forwards: list[int]
) -> None:
    model = Counting()
    block = WholeTarget(model).forward(as_row([1] * 64), [KVCache()], want=want)
    assert model.forwards == forwards
    assert block.logits.shape[0] == {"none": 0, "last": 1, "all": 64}[want]


def decoded(model: nn.Module, ending: EndAt, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, int]:
    """The ids of a plain answer of up to 40 tokens, and the steps issued before their token."""
    ahead: list[object] = []
    issued = cast("Any", mx).async_eval

    def counted(*arrays: Any) -> None:
        ahead.append(arrays)
        issued(*arrays)

    verifier = LocalVerifier(WholeTarget(model), make_prompt_cache(model))
    task = Task(PROMPT, 40, 16)
    with monkeypatch.context() as patched:
        patched.setattr(mx, "async_eval", counted)
        steps = list(
            Generation(task, verifier, NoDrafter(), Sampler(Sampling(), 0), ending).steps()
        )
    ids = [token for step in steps if isinstance(step, Round) for token in step.tokens]
    return ids, len(ahead)


def theirs(model: Any) -> Sequence[int]:
    return [int(token) for token, _ in generate_step(mx.array(PROMPT), model, max_tokens=40)]


PROMPT = [(7 * i + 3) % 64 for i in range(24)]


@pytest.mark.parametrize("end", [1, 2, 23, 40])
def test_plain_decoding_overlaps_where_rows_cannot_be_taken_back(
    end: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sliding windows: the row in flight stays behind with caches that end with the answer."""
    mx.random.seed(0)
    model = gpt_oss.Model(GPT_OSS)
    ids, ahead = decoded(model, EndAt(end), monkeypatch)
    assert ids == theirs(model)[:end]
    assert ahead == min(end, 39)
