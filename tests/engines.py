"""Engines of whole models, by default of the demo checkpoint, as a runner builds them."""

import dataclasses
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from exo_node.mtp.drafting.round_policy import Offer, RoundChoice, RoundPolicy
from exo_node.mtp.types import GenerationStats, Round, Sampling
from exo_node.proto import peer_pb2 as pb
from exo_node.proto.fields import changed as changed_message
from exo_node.shard.engine.answers.events import AnswerEnd, Delta
from exo_node.shard.engine.answers.text_engine import TextEngine
from exo_node.shard.engine.options import EngineOptions
from exo_node.shard.engine.request import Parameters
from exo_node.shard.model.load import Loaded, load
from exo_node.shard.pipeline.link import StageLink

DEMO = Path(str(files("exo_node.shard"))) / "models" / "demo"
ORACLE: list[dict[str, Any]] = json.loads(
    (Path(__file__).parent / "oracle" / "demo.json").read_text()
)
STORY: dict[str, Any] = next(row for row in ORACLE if row["prompt"] == "Tell me a story.")
SUM: dict[str, Any] = next(row for row in ORACLE if row["prompt"] == "What is 34 + 58?")
CHUNK = 256
_NUMBERS = itertools.count(1)


class Stretches(RoundPolicy):
    """Drafts `k` tokens a round in the first `drafted` of each `period` rows, in others none."""

    def __init__(self, k: int, drafted: int, period: int) -> None:
        super().__init__()
        self._k, self._drafted, self._period = k, drafted, period

    def choose(
        self, offers: Sequence[Offer], position: int = 0, *, unread: int = 0, running: int = 0
    ) -> RoundChoice:
        del unread, running
        drafts = position % self._period < self._drafted
        k = min(offers[0].limit, self._k if drafts else 0)
        return RoundChoice(k, k, [False], k, offers, position)


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one request."""

    ids: tuple[int, ...]
    text: str
    rounds: tuple[Round, ...]
    end: AnswerEnd

    @property
    def stats(self) -> GenerationStats:
        return self.end.stats


def spec(
    folder: Path = DEMO, first: int = 0, end: int = 16, stage: int = 0, **changes: Any
) -> pb.StageSpec:
    defaults: dict[str, Any] = {
        "placement": "p1",
        "model": "demo",
        "stage": stage,
        "num_stages": 1,
        "first_layer": first,
        "end_layer": end,
        "num_layers": 16,
        "dtype": "float32",
        "prefill_chunk": CHUNK,
        "context_length": 4096,
        "native_mtp": False,
        "max_draft_tokens": 3,
        "async_draft_eval": True,
        "mtp_hidden": "post_norm",
        "path": str(folder),
        "lease_s": 10,
        "batching": True,
        "measure_at_load": True,
    }
    return pb.StageSpec(**(defaults | changes))


def last_spec(**changes: Any) -> pb.StageSpec:
    """The last of two stages, which starts sooner than a generator: it needs no tokenizer."""
    return spec(DEMO, 15, 16, 1, num_stages=2, **changes)


def load_quietly(stage_spec: pb.StageSpec) -> Loaded:
    return load(stage_spec, lambda _: None)


def engine_of(
    loaded: Loaded, stage_spec: pb.StageSpec, link: StageLink | None = None, **parts: Any
) -> TextEngine:
    return TextEngine(loaded, EngineOptions.of(stage_spec), link=link, **parts)


def whole_engine(folder: Path = DEMO, **changes: Any) -> TextEngine:
    stage_spec = spec(folder, **({"native_mtp": True} | changes))
    return engine_of(load_quietly(stage_spec), stage_spec)


def request(prompt: Sequence[int], k: int = 0, max_tokens: int = 200, **changes: Any) -> Parameters:
    """A request. `changes`: see `changed`."""
    name, limits = f"r{next(_NUMBERS)}", pb.Limits(max_tokens=max_tokens)
    drafting = pb.Drafting(num_draft_tokens=k, drafting_reason="" if k else "a test")
    return changed(Parameters(name, 1, prompt, Sampling(), limits, drafting), **changes)


def changed(parameters: Parameters, **changes: Any) -> Parameters:
    """The request with other values of some fields, its own or those of its groups."""
    own = {each.name for each in dataclasses.fields(Parameters)}
    values: dict[str, Any] = {name: changes.pop(name) for name in own & changes.keys()}
    for group, fields in grouped(changes).items():
        values[group] = changed_message(getattr(parameters, group), **fields)
    return dataclasses.replace(parameters, **values)


def message(**fields: Any) -> pb.GenerateRequest:
    """A request as it goes over the wire, by the names of its fields and of those of its groups."""
    names = pb.GenerateRequest.DESCRIPTOR.fields_by_name.keys()
    own = {name: fields.pop(name) for name in names & fields.keys()}
    wire = pb.GenerateRequest(**own)
    for group, values in grouped(fields).items():
        getattr(wire, group).MergeFrom(type(getattr(wire, group))(**values))
    return wire


def grouped(fields: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Fields by the group of `GenerateRequest` that has them."""
    groups = dict[str, dict[str, Any]]()
    for group in ("limits", "drafting", "output", "sharing"):
        kind = pb.GenerateRequest.DESCRIPTOR.fields_by_name[group].message_type
        assert kind is not None
        names = kind.fields_by_name.keys() & fields.keys()
        groups |= {group: {name: fields.pop(name) for name in names}} if names else {}
    assert not fields, f"no request has {list(fields)}"
    return groups


def answer(engine: TextEngine, engine_request: Parameters) -> Answer:
    """Drives one request to its end; futures of a loopback are done already."""
    events = list(engine.generate(engine_request))
    deltas = [event for event in events if isinstance(event, Delta)]
    end = events[-1]
    assert isinstance(end, AnswerEnd)
    rounds = tuple(delta.round for delta in deltas)
    text = "".join(delta.text for delta in deltas) + end.text
    return Answer(tuple(t for r in rounds for t in r.tokens), text, rounds, end)
