"""A whole model as a target: which forwards are made of what it is asked."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from mlx_lm.generate import generate_step
from mlx_lm.models import gpt_oss
from mlx_lm.models.cache import KVCache, make_prompt_cache
from tables import EndAt
from zoo import VOCABULARY, tiny_config
from zoo_runs import small

from exo_node.mtp.seams import Want, as_row
from exo_node.mtp.targets import WholeTarget
from exo_node.shard.kernels import row_groups
from exo_node.shard.model.stage_model import StageModel
from exo_node.shard.tools.bare_engine import bare_engine, bare_request, ids_of, rounds_of

V = 8
PROMPT = [(7 * i + 3) % 64 for i in range(24)]
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


@pytest.mark.parametrize(("end", "forwards"), [(1, 0), (2, 2), (23, 23), (40, 39)])
def test_rounds_overlap_where_rows_cannot_be_taken_back(
    end: int, forwards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sliding windows: the row in flight stays behind with caches that end with the answer."""
    mx.random.seed(0)
    model, issued = gpt_oss.Model(GPT_OSS), list[int]()
    forward = WholeTarget.forward_batch

    def counted(target: WholeTarget, tokens: mx.array, caches: Sequence[object]) -> Any:
        issued.append(tokens.shape[1])
        return forward(target, tokens, caches)

    monkeypatch.setattr(WholeTarget, "forward_batch", counted)
    engine = bare_engine(WholeTarget(model), lambda: make_prompt_cache(model), runs_ahead=True)
    engine_request = bare_request(PROMPT, 40, 16, stop_condition=EndAt(end))
    (rounds,) = rounds_of(engine, [engine_request])
    theirs = [int(token) for token, _ in generate_step(mx.array(PROMPT), model, max_tokens=end)]
    assert list(ids_of(rounds)) == theirs
    assert issued == [1] * forwards


class Remembering(nn.Module):
    """A model whose logits need the output of its first layer as well."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.layers = model.model, model.model.layers

    def __call__(self, ids: mx.array, cache: Any) -> mx.array:
        h = self.model.embed_tokens(ids)
        h = first = self.layers[0](h, None, cache[0])
        for layer, each in zip(self.layers[1:], cache[1:], strict=True):
            h = layer(h, None, each)
        return self.model.embed_tokens.as_linear(h + first)

    def make_cache(self) -> list[Any]:
        return [KVCache() for _ in self.layers]


def test_a_prompts_end_is_read_through_the_layers_only_where_nothing_else_is_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain: Any = small(tiny_config("llama"))
    other = Remembering(plain)
    stages = [StageModel(model, 0, len(plain.layers)) for model in (plain, other)]
    assert not any(stage.reads_ends for stage in stages), "rows have the same bits on a CPU"
    monkeypatch.setattr(row_groups, "may_depend_on_rows", lambda: True)
    assert [stage.reads_ends for stage in stages] == [True, False]

    ids, stage = as_row(PROMPT), stages[0]
    split, whole = (
        WholeTarget(plain, layers=layers).forward(ids, stage.make_caches(), want="last").logits
        for layers in (None, stage)
    )
    assert split.shape == whole.shape == (1, VOCABULARY)
    assert mx.array_equal(split, whole).item()
