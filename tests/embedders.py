"""The tiny embedders of `tests/oracle/`, a decoder and encoders, and engines that run them."""

import json
import shutil
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from engines import load_quietly, spec

from exo_node.mtp.types import GenerationStats
from exo_node.shard.engine.answers.embedding_engine import (
    EmbeddingEngine,
    EmbeddingRequest,
    EmbeddingRun,
)
from exo_node.shard.engine.options import EngineOptions

EMBEDDER = Path(__file__).parent / "oracle" / "qwen3_embedding"
LAYERS, SIZE = 3, 64
ROWS: list[dict[str, Any]] = json.loads((EMBEDDER / "oracle.json").read_text())
INPUTS: dict[int, list[int]] = {number: row["ids"] for number, row in enumerate(ROWS)}
NEAR = 1e-5
FIELDS: dict[str, Any] = {
    "end_layer": LAYERS,
    "num_layers": LAYERS,
    "pooling": "last",
    "hidden_size": SIZE,
    "vocabulary": 260,
    "prefill_chunk": 256,
}
"""Of a stage's specification."""
ENCODERS = ("bert", "xlm_roberta", "modernbert")


def embedding_engine(folder: Path = EMBEDDER, **changes: Any) -> EmbeddingEngine:
    fields = FIELDS | changes
    stage = spec(folder, 0, fields.pop("end_layer"), **fields)
    return EmbeddingEngine(load_quietly(stage), EngineOptions.of(stage))


@dataclass
class Inline:
    """A compute thread's part, played by the test's own thread."""

    step: Callable[[], bool] = lambda: False

    def attach(self, step: Callable[[], bool]) -> None:
        self.step = step

    def post(self, run: Callable[[], None]) -> None:
        run()


@dataclass
class Running:
    """A request in an engine that the test steps."""

    run: EmbeddingRun
    vectors: dict[int, list[float]] = field(default_factory=dict[int, list[float]])
    stats: GenerationStats | None = None
    fault: BaseException | None = None

    @property
    def has_ended(self) -> bool:
        return self.stats is not None or self.fault is not None


def begin(
    engine: EmbeddingEngine,
    inline: Inline,
    prompts: Mapping[int, Sequence[int]],
    name: str = "r1",
    dimensions: int = SIZE,
    **fields: Any,
) -> Running:
    running = Running(cast(Any, None))

    def put(item: object) -> None:
        assert not running.has_ended
        match item:
            case (int(index), bytes(data)):
                running.vectors[index] = floats(data)
            case GenerationStats():
                running.stats = item
            case BaseException():
                running.fault = item
            case _:
                raise AssertionError(item)

    request = EmbeddingRequest(name, 1, prompts, dimensions, **fields)
    running.run = engine.drive(cast(Any, inline), request, put)
    return running


def embedded(
    engine: EmbeddingEngine, prompts: Mapping[int, Sequence[int]], **fields: Any
) -> dict[int, list[float]]:
    """The vectors of a request that runs alone. Raises its error."""
    inline = Inline()
    running = begin(engine, inline, prompts, **fields)
    while not running.has_ended:
        assert inline.step()
    if running.fault is not None:
        raise running.fault
    assert running.stats is not None
    assert running.stats.prompt_tokens == sum(map(len, prompts.values()))
    return running.vectors


def encoder(family: str) -> Path:
    """The folder of a tiny encoder of `tests/oracle/embedders.py`."""
    return EMBEDDER.parent / f"encoder_{family}"


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """The oracle's inputs and embeddings for a tiny embedder."""
    return json.loads((folder / "oracle.json").read_text())


def encoder_engine(family: str, folder: Path | None = None, **changes: Any) -> EmbeddingEngine:
    """`folder`: a changed copy of that family's checkpoint."""
    config = json.loads((encoder(family) / "config.json").read_text())
    layers = config["num_hidden_layers"]
    fields = {
        "end_layer": layers,
        "num_layers": layers,
        "vocabulary": config["vocab_size"],
        "context_length": 1000,
        "pooling": "mean" if family == "bert" else "cls",
    }
    return embedding_engine(folder or encoder(family), **(fields | changes))


def floats(data: bytes) -> list[float]:
    return array("f", data).tolist()


def difference(some: Sequence[float], others: Sequence[float]) -> float:
    """The largest of any number."""
    return max(abs(a - b) for a, b in zip(some, others, strict=True))


def copied(folder: Path, source: Path = EMBEDDER, **config: Any) -> Path:
    """A copy of a checkpoint without the oracle's numbers; `config`: changes to config.json."""
    _ = shutil.copytree(source, folder, ignore=shutil.ignore_patterns("oracle.json"))
    original = json.loads((source / "config.json").read_text())
    _ = (folder / "config.json").write_text(json.dumps(original | config))
    return folder
