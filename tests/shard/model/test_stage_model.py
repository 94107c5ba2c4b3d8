"""Layers [a, b) of a model: the same bits as the whole, and nothing of the other layers."""

import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from engines import load_quietly, spec
from mlx.utils import tree_map
from mlx_lm.models.llama import TransformerBlock
from models import Family, bytes_of_ends, bytes_of_layers, make_checkpoint

from exo_node.placement.errors import InvalidCheckpoint, LoadFailed
from exo_node.shard.checkpoint.checkpoint import read_checkpoint
from exo_node.shard.model.load import Loaded, bytes_read
from exo_node.shard.model.open_model import open_model, read_layers
from exo_node.shard.model.stage_model import StageModel

HIDDEN, LAYERS = 64, 4
FAMILIES: tuple[Family, ...] = ("llama", "qwen3", "qwen3_5", "qwen3_5_moe")
WINDOWED = "llama with sliding windows"
SPLITS = ((0, 1, 4), (0, 2, 4), (0, 3, 4), (0, 1, 3, 4), (0, 2, 3, 4))
STEPS = (7, 1, 3, 1, 2)
"""Rows of each forward: a prompt, then single rows and blocks of several."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("families")
    folders_by_name: dict[str, Path] = {
        family: make_checkpoint(
            base / family, family, dtype="float32", layers=LAYERS, mtp=False, tied=family == "qwen3"
        )
        for family in FAMILIES
    }
    windows = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
    return folders_by_name | {
        WINDOWED: edited(folders_by_name["llama"], base / "windowed", windows)
    }


def edited(source: Path, folder: Path, changes: dict[str, Any]) -> Path:
    """The same weights with other fields in config.json."""
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(source / "model.safetensors")
    config = json.loads((source / "config.json").read_text()) | changes
    _ = (folder / "config.json").write_text(json.dumps(config))
    return folder


def opened(folder: Path, first: int = 0, end: int = LAYERS) -> StageModel:
    model = open_model(folder)
    _ = read_layers(
        model, first, end, mx.float32, outer=first == 0, progress=lambda _read, _total: None
    )
    return StageModel(model, first, end)


def ids(position: int, rows: int) -> mx.array:
    return mx.array([[(7 * i + 3) % 512 for i in range(position, position + rows)]])


def whole_logits(folder: Path) -> list[mx.array]:
    model: Any = opened(folder).model
    caches = StageModel(model, 0, LAYERS).make_caches()
    starts = itertools.accumulate(STEPS[:-1], initial=0)
    return [model(ids(at, rows), cache=caches) for at, rows in zip(starts, STEPS, strict=True)]


def staged_logits(stages: Sequence[StageModel]) -> list[mx.array]:
    caches = [stage.make_caches() for stage in stages]
    logits: list[mx.array] = []
    position = 0
    for rows in STEPS:
        tokens, hidden = ids(position, rows), None
        for stage, own in zip(stages, caches, strict=True):
            hidden = stage.hidden(tokens, hidden, own)
            mx.eval(hidden)
        assert hidden is not None
        logits.append(stages[0].logits(tokens, hidden))
        position += rows
    return logits


def same(a: Sequence[mx.array], b: Sequence[mx.array]) -> bool:
    return len(a) == len(b) and all(bool(mx.array_equal(x, y)) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("bounds", SPLITS, ids=str)
@pytest.mark.parametrize("family", [*FAMILIES, WINDOWED])
def test_stages_compute_the_whole_models_bits(
    folders: dict[str, Path], family: str, bounds: tuple[int, ...]
) -> None:
    stages = [opened(folders[family], a, b) for a, b in itertools.pairwise(bounds)]
    whole = whole_logits(folders[family])
    assert not bool(mx.array_equal(whole[0][:, -1], whole[1][:, -1]))
    assert same(staged_logits(stages), whole)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_parameters_of_other_stages_do_not_matter(
    folders: dict[str, Path], family: str
) -> None:
    """Those of other layers, and but for the generator embedding, norm and lm_head."""
    stages = [opened(folders[family], a, b) for a, b in ((0, 1), (1, 3), (3, 4))]
    for stage in stages:
        layers = layers_of(stage)
        own = [layer.parameters() for layer in layers[stage.first : stage.end]]
        for module in [stage.model] if stage.first else layers:
            poison(module)
        for layer, parameters in zip(layers[stage.first : stage.end], own, strict=True):
            layer.update(parameters)
    assert same(staged_logits(stages), whole_logits(folders[family]))
    poison(layers_of(stages[1])[2])
    assert all(bool(mx.isnan(logits).any()) for logits in staged_logits(stages))


def layers_of(stage: StageModel) -> list[Any]:
    model: Any = stage.model
    return model.layers


def poison(module: Any) -> None:
    module.update(tree_map(_nan, module.parameters()))


def _nan(parameter: mx.array) -> mx.array:
    return mx.full(parameter.shape, float("nan"), parameter.dtype)


def test_the_model_is_whole_again_after_a_stage_ran(folders: dict[str, Path]) -> None:
    stage = opened(folders["llama"], 0, 2)
    before = list(layers_of(stage))
    _ = staged_logits([stage, opened(folders["llama"], 2, 4)])
    assert all(a is b for a, b in zip(layers_of(stage), before, strict=True))


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layers of 0.8 MB in bfloat16, much more than the headers and what else is read."""
    folder = tmp_path_factory.mktemp("wide") / "qwen3"
    return make_checkpoint(folder, "qwen3", hidden=256, layers=6, vocab=4096, shards=3)


@pytest.mark.parametrize("bounds", [(1, 3), (2, 6), (5, 6)], ids=str)
def test_a_stage_reads_only_its_layers_bytes(wide: Path, bounds: tuple[int, int]) -> None:
    own = bytes_of_layers(read_checkpoint(wide), *bounds)
    loaded = load_part(wide, *bounds)
    overhead = loaded.checkpoint_bytes_read - own
    one_layer = bytes_of_layers(read_checkpoint(wide), 0, 1)
    assert 0 <= overhead < one_layer // 4
    assert loaded.weight_bytes == 2 * own, "float32 in memory, bfloat16 on disk"


def test_the_generator_reads_its_layers_and_the_ends(wide: Path) -> None:
    checkpoint = read_checkpoint(wide)
    own = bytes_of_layers(checkpoint, 0, 2) + bytes_of_ends(checkpoint)
    overhead = load_part(wide, 0, 2).checkpoint_bytes_read - own
    assert 0 <= overhead < bytes_of_layers(checkpoint, 0, 1) // 4


def test_what_a_compiler_read_counts_for_no_checkpoint(tmp_path: Path) -> None:
    big = tmp_path / "big"
    _ = big.write_bytes(bytes(3_000_000))
    before = bytes_read()
    _ = subprocess.run(["/bin/cat", str(big)], check=True, stdout=subprocess.DEVNULL)
    assert bytes_read() - before < 1_000_000
    _ = big.read_bytes()
    assert bytes_read() - before >= 3_000_000 or sys.platform == "darwin"


def load_part(folder: Path, first: int, end: int, layers: int = 6) -> Loaded:
    # Once before, so that the modules that Python reads on first use are not counted.
    _ = load_quietly(spec(folder, 0, 1, num_stages=2, num_layers=layers))
    return load_quietly(
        spec(folder, first, end, int(first > 0), num_stages=2, num_layers=layers, mtp_hidden="")
    )


def with_more(out: mx.array) -> object:
    """Layers that pass on more than hidden states, as in some architectures."""
    return out, 1


def with_an_axis_more(out: mx.array) -> object:
    return mx.stack([out, out])


@pytest.mark.parametrize(("first", "end"), [(0, 1), (0, 2), (2, 3), (1, 4)])
@pytest.mark.parametrize("giving", [with_more, with_an_axis_more])
def test_a_model_whose_layers_give_more_than_hidden_states_is_refused_at_load(
    folders: dict[str, Path],
    giving: Callable[[mx.array], object],
    first: int,
    end: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain: Any = TransformerBlock.__call__

    def more(self: Any, *args: Any, **kwargs: Any) -> Any:
        return giving(plain(self, *args, **kwargs))

    monkeypatch.setattr(TransformerBlock, "__call__", more)
    stage_spec = spec(folders["llama"], first, end, int(first > 0), num_stages=2, num_layers=LAYERS)
    with pytest.raises(LoadFailed, match=r"cannot be a stage.*; place it on one node"):
        _ = load_quietly(stage_spec)


@pytest.mark.parametrize(("first", "end"), [(0, 3), (3, 4)])
def test_a_card_with_another_hidden_size_is_refused_where_hidden_states_are_sent(
    folders: dict[str, Path], first: int, end: int
) -> None:
    form = {"num_stages": 2, "num_layers": LAYERS, "hidden_size": HIDDEN + 1}
    with pytest.raises(LoadFailed, match="hidden states of 65 numbers; set hidden_size") as refused:
        _ = load_quietly(spec(folders["llama"], first, end, int(first > 0), **form))
    assert refused.value.param == "hidden_size"


@pytest.mark.parametrize("bounds", [(2, 2), (3, 2), (2, 5), (4, 5), (-1, 2)], ids=str)
def test_layers_that_are_not_there_are_refused(
    folders: dict[str, Path], bounds: tuple[int, int]
) -> None:
    with pytest.raises(LoadFailed, match="the model has 4"):
        _ = opened(folders["llama"], *bounds)


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "../../x"},
        {"model_type": "nosuch"},
        {"model_type": 7},
        {"model_type": "olmo"},  # its import exits the process where ai2-olmo is not installed
        {"num_attention_heads": 0},
        {"num_attention_heads": 5},
        {"hidden_size": 128},
        {"hidden_size": "64"},
        {"vocab_size": 100},
        {"num_hidden_layers": 3},
        {"num_hidden_layers": 5},
        {"num_hidden_layers": None},
        {"rope_scaling": 3},
        {"rope_scaling": []},
        {"rms_norm_eps": "x"},
        {"layer_types": 3},
        {"layer_types": ["nosuch"] * 4},
        {"rope_scaling": {"type": "nosuch", "factor": 2.0}},
        {"quantization": "yes"},
    ],
    ids=str,
)
def test_a_config_that_does_not_fit_is_an_invalid_checkpoint(
    tmp_path: Path, folders: dict[str, Path], changes: dict[str, Any]
) -> None:
    folder = edited(folders["llama"], tmp_path / "model", changes)
    with pytest.raises(InvalidCheckpoint, match=r"does not fit an architecture|has no class for"):
        _ = load_quietly(spec(folder, 1, 4, 1, num_layers=4, num_stages=2))
