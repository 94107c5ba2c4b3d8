"""Answers that fill a gap, whose ends are more than other answers have."""

import shutil
from pathlib import Path

from added_tokens import add_tokens
from engines import answer, engine_of, load_quietly, request
from models import make_checkpoint
from small import LAYERS, small_spec

from exo_node.mtp.types import Sampling
from exo_node.shard.model.load import Loaded


def test_a_token_of_gaps_ends_an_answer_that_fills_one(tmp_path: Path) -> None:
    plain = make_checkpoint(tmp_path / "a", "qwen3_5", vocab=4096, raw=False, dtype="float32")
    folder = make_checkpoint(tmp_path / "b", "qwen3_5", vocab=4112, raw=False, dtype="float32")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        _ = shutil.copy(plain / name, folder / name)
    ids = add_tokens(folder, ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"))
    spec = small_spec(native_mtp=True)
    spec.path, spec.num_layers = str(folder), LAYERS
    loaded: Loaded = load_quietly(spec)
    engine = engine_of(loaded, spec)
    prefix = ids["<|fim_prefix|>"]
    likely = Sampling(logit_bias=((prefix, 100.0),))
    for fills_gap, reason, count in ((True, "stop", 1), (False, "length", 6)):
        got = answer(engine, request([5, 6, 7], 0, 6, sampling=likely, fills_gap=fills_gap))
        assert (got.end.reason, got.ids) == (reason, (prefix,) * count)
