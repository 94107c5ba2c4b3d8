"""Drafts that are copied from the prompt: the same ids, and what they cost or give.

    python bench/prompt_lookup.py ids [--model copies] [--tokens 20000]
    python bench/prompt_lookup.py speed [--model copies] [--repeats 15] [--kind prose]

In float32. The model `copies` was trained to copy a file: it is given 200 lines and the new form
of one of them, and answers with the whole file. The demo cannot, so text is repeated as the demo
itself says it: a conversation holds an answer, perhaps with words changed, and asks for it again.
So copies stand as far as the changed words.

`ids` compares answers with copies (fixed and adaptive lengths; no head, fixed K and adaptive K;
greedy, seeded, penalised and under a grammar; cold, after a cached prefix and resumed) with plain
decoding, until enough ids were compared. It ends with status 1 if one differs.

`speed` runs all arms once in each repeat, in rotating order; ratios are taken within a repeat. Arms
without the head run on a model that was loaded without it. It ends with status 1 if an arm's ids
are not those of `plain`.
Rates count the tokens after the first one over the time since it; with `--clock cpu` over the CPU
time of this process, which other programs disturb less. The policy itself goes by the wall clock.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, cycle, zip_longest
from pathlib import Path

from forced_copies import FixedLength, force

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from typing import Any

from exo_node.shard.model import loader_import  # before MLX, so that products of our own may be

# isort: split
from engines import DEMO
from engines import spec as stage_spec

from exo_node.mtp.types import Round, Sampling
from exo_node.proto import peer_pb2 as pb
from exo_node.shard.engine.answers.events import AnswerEnd, Delta
from exo_node.shard.engine.answers.text_engine import TextEngine
from exo_node.shard.engine.options import EngineOptions
from exo_node.shard.engine.request import Parameters
from exo_node.shard.model.load import Loaded, load
from exo_node.shard.text.grammars.grammar import Gate
from exo_node.shard.text.grammars.grammars import GrammarSpec

LOADER = loader_import.__name__
MODELS = {"demo": DEMO, "copies": Path(__file__).parent / "copies"}
LAYERS = {"demo": 16, "copies": 4}
LINES = 200
MAX_K = 7
TOKENS = 120
PROSE = (
    "Tell me a story.",
    "Who are you?",
    "What does ocean mean?",
    "Tell me a story about a fox.",
)
AGAIN = ("Tell me a story.", "Count from 5 to 25.", "Count from 30 to 55.")
ARMS = {"plain": (0, False), "mtp": (MAX_K, False), "lookup": (0, True), "both": (MAX_K, True)}


@dataclass(frozen=True, slots=True)
class Timed:
    """One answer, its rounds, its end, and tokens a second after the first."""

    ids: tuple[int, ...]
    text: str
    rounds: tuple[Round, ...]
    end: AnswerEnd
    rate: float


def spec(model: str, *, native_mtp: bool = True) -> pb.StageSpec:
    layers = LAYERS[model]
    changes = {"num_layers": layers, "native_mtp": native_mtp, "prompt_lookup": True}
    return stage_spec(MODELS[model], end=layers, max_draft_tokens=MAX_K, **changes)


def open_engine(loaded: Loaded, model: str, *, prefixes: bool = False) -> TextEngine:
    options = EngineOptions.of(spec(model, native_mtp=loaded.head is not None))
    return TextEngine(loaded, replace(options, prefix_cache_bytes=(1 << 30) * prefixes))


def timed(
    engine: TextEngine, request: Parameters, clock: Callable[[], float] = time.perf_counter
) -> Timed:
    rounds, text, first, last = list[Round](), "", 0.0, 0.0
    for event in engine.generate(request):
        if isinstance(event, Delta):
            last = clock()
            first = first or last
            rounds.append(event.round)
            text += event.text
        elif isinstance(event, AnswerEnd):
            ids = tuple(token for each in rounds for token in each.tokens)
            rate = (len(ids) - 1) / (last - first) if last > first else 0.0
            return Timed(ids, text + event.text, tuple(rounds), event, rate)
    raise AssertionError("an answer without an end")


def request_of(
    prompt: Sequence[int],
    k: int,
    lookup: bool,
    *,
    adaptive: bool | None = None,
    max_tokens: int = TOKENS,
    **changes: Any,
) -> Parameters:
    drafting = pb.Drafting(
        num_draft_tokens=k,
        drafting_reason="" if k else "an arm without the head",
        adaptive_draft=k > 0 if adaptive is None else adaptive,
        prompt_lookup=lookup,
    )
    bare = Parameters("bench", 1, prompt, Sampling(), pb.Limits(max_tokens=max_tokens), drafting)
    return replace(bare, **changes)


def chat(engine: TextEngine, *turns: str) -> list[int]:
    roles = cycle(("user", "assistant"))
    return engine.codec.encode_chat(
        [{"role": r, "content": t} for r, t in zip(roles, turns, strict=False)]
    )


def text_of(engine: TextEngine, question: str) -> str:
    """The demo's own answer."""
    return timed(engine, request_of(chat(engine, question), 0, lookup=False)).text


def edited(text: str, every: int) -> str:
    """The text with each `every`-th word replaced by the first one."""
    words = text.split(" ")
    return " ".join(words[0] if i % every == every - 1 else w for i, w in enumerate(words))


def edits(draw: random.Random, lines: int) -> tuple[str, str]:
    """(A prompt for `copies`, its answer): lines of a key and two words, one of them changed."""
    tokenizer = json.loads((MODELS["copies"] / "tokenizer.json").read_text())
    vocabulary: dict[str, int] = tokenizer["model"]["vocab"]
    words = sorted(f" {token[1:]}" for token in vocabulary if token[0] == "Ġ" and len(token) == 5)
    own = draw.sample(words, 2 * lines)  # no two lines begin or end alike
    file = [[key, draw.choice(words), end] for key, end in zip(own[::2], own[1::2], strict=True)]
    line = draw.choice(file)
    before = "".join("".join(each) + "\n" for each in file)
    line[1] = draw.choice([word for word in words if word != line[1]])
    after = "".join("".join(each) + "\n" for each in file)
    return "".join(line) + "\n" + before, after.removeprefix(" ")


def cases(engine: TextEngine, model: str) -> dict[str, list[list[int]]]:
    """Prompts by kind."""
    if model == "copies":
        draw = random.Random(7)
        return {"copy-edit": [chat(engine, edits(draw, LINES)[0]) for _ in range(3)]}
    own = {question: text_of(engine, question) for question in AGAIN}
    return {
        "prose": [chat(engine, question) for question in PROSE],
        "again": [chat(engine, q, text, q) for q, text in own.items()],
        "again, 1 word in 16 changed": [
            chat(engine, q, edited(text, 16), q) for q, text in own.items()
        ],
    }


def compare_ids(model: str, least: int) -> int:
    """Returns the number of answers whose ids differ. Ends only once some ids were copied."""
    loaded = load(spec(model), lambda _: None)
    plain_engine = open_engine(loaded, model)
    kinds = zip_longest(*cases(plain_engine, model).values())
    prompts = [prompt for each in kinds for prompt in each if prompt is not None]
    draw, compared, copied, different = random.Random(5), 0, 0, 0
    for number in count():
        if compared >= least and copied:
            break
        prompt = prompts[number % len(prompts)]
        kind = ("greedy", "seeded", "penalised", "grammar")[number // len(prompts) % 4]
        expected = timed(
            plain_engine, request_of(prompt, 0, lookup=False, **options(kind, plain_engine))
        )
        for name, engine, k, adaptive in variants(loaded, model):
            request = request_of(prompt, k, lookup=True, adaptive=adaptive, **options(kind, engine))
            got = timed(engine, request)
            again = timed(engine, replace(request, **options(kind, engine)))  # after its prefix
            cut = draw.randrange(1, len(got.rounds)) if len(got.rounds) > 1 else 1
            log = got.rounds[:cut]
            resumed = timed(
                engine, replace(request, attempt=2, replay=log, **options(kind, engine))
            )
            whole = tuple(t for each in log for t in each.tokens) + resumed.ids
            for way, ids in (("cold", got.ids), ("prefix", again.ids), ("resumed", whole)):
                compared += len(ids)
                if ids != expected.ids:
                    different += 1
                    print(f"differs: {kind}, {name}, {way}, prompt {number}", flush=True)
            copied += got.end.stats.lookup_accepted_tokens
        print(f"{compared} ids compared, {copied} copied, {different} different", flush=True)
    return different


def variants(loaded: Loaded, model: str) -> Iterator[tuple[str, TextEngine, int, bool]]:
    """(name, engine, K, whether K is adaptive) of each way to draft."""
    for length in (3, 7, 15):
        engine = open_engine(loaded, model, prefixes=True)
        force(engine.lookup, FixedLength(length))
        for k, adaptive in ((0, False), (2, False), (MAX_K, False), (MAX_K, True)):
            yield f"length {length}, K {k}{' adaptive' * adaptive}", engine, k, adaptive
    engine = open_engine(loaded, model, prefixes=True)
    engine.measurements.measure()
    for k, adaptive in ((0, False), (1, False), (MAX_K, True)):
        yield f"by costs, K {k}{' adaptive' * adaptive}", engine, k, adaptive


def options(kind: str, engine: TextEngine) -> dict[str, Any]:
    """Options of a request; a grammar has a state, so each has its own."""
    match kind:
        case "seeded":
            return {"sampling": Sampling(temperature=0.7, seed=3)}
        case "penalised":
            return {"sampling": Sampling(repetition_penalty=1.05, repetition_context_size=40)}
        case "grammar":
            spec = GrammarSpec("json_schema", json.dumps({"type": "string"}), "f")
            return {"grammar": engine.codec.grammars.compile(spec, Gate())}
        case _:
            return {}


def compare_speeds(
    model: str, repeats: int, kinds: Sequence[str], clock: Callable[[], float]
) -> int:
    """Returns the number of answers whose ids are not those of the arm `plain`."""
    engines = dict[bool, TextEngine]()
    for has_head in (True, False):
        loaded = load(spec(model, native_mtp=has_head), lambda _: None)
        engines[has_head] = open_engine(loaded, model)
        engines[has_head].measurements.measure()
        print(
            "kernels",
            [str(each) for each in loaded.kernels],
            engines[has_head].measurements.identity,
        )
    rates: dict[str, dict[str, list[float]]] = {}
    names, different = list(ARMS), 0
    by_kind = {
        name: each
        for name, each in cases(engines[False], model).items()
        if not kinds or name in kinds
    }
    for name, prompts in by_kind.items():
        rates[name] = {arm: [] for arm in names}
        tokens = TOKENS if model == "demo" else 4 * LINES
        plain = [run(engines, "plain", prompt, clock, tokens) for prompt in prompts]
        for prompt in prompts:
            for arm in names:
                _ = run(engines, arm, prompt, clock, tokens)
        for repeat in range(repeats):
            for number, prompt in enumerate(prompts):
                turn = (repeat + number) % len(names)
                for arm in (*names[turn:], *names[:turn]):
                    answer = run(engines, arm, prompt, clock, tokens)
                    rates[name][arm].append(answer.rate)
                    different += answer.ids != plain[number].ids
        report(name, rates[name])
        if model == "copies":
            print(f"lines of the changed files in the answers: {lines_of_files(plain)}")
    print(f"{different} answers are not plain decoding's", flush=True)
    return different


def lines_of_files(answers: Sequence[Timed]) -> str:
    """The share of the changed files' lines that the answers hold."""
    draw = random.Random(7)
    files = [edits(draw, LINES)[1].splitlines() for _ in answers]
    pairs = zip(files, answers, strict=True)
    counts = [len(set(file) & set(answer.text.splitlines())) for file, answer in pairs]
    return ", ".join(f"{lines} of {LINES}" for lines in counts)


def run(
    engines: dict[bool, TextEngine],
    arm: str,
    prompt: Sequence[int],
    clock: Callable[[], float],
    tokens: int,
) -> Timed:
    k, lookup = ARMS[arm]
    return timed(engines[k > 0], request_of(prompt, k, lookup=lookup, max_tokens=tokens), clock)


def report(name: str, rates: dict[str, list[float]]) -> None:
    """Medians of ratios within a repeat, with their quartiles."""

    def ratio(of: str, to: str) -> str:
        values = sorted(a / b for a, b in zip(rates[of], rates[to], strict=True))
        low, middle, high = statistics.quantiles(values, n=4)
        return f"{of}/{to} {middle:.3f} ({low:.3f} to {high:.3f})"

    medians = ", ".join(f"{arm} {statistics.median(each):.1f}" for arm, each in rates.items())
    pairs = (("mtp", "plain"), ("lookup", "plain"), ("both", "mtp"), ("both", "plain"))
    print(f"{name}: tokens/s {medians}; {'; '.join(ratio(*pair) for pair in pairs)}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    _ = parser.add_argument("what", choices=("ids", "speed"))
    _ = parser.add_argument("--model", choices=tuple(LAYERS), default="demo")
    _ = parser.add_argument("--tokens", type=int, default=20_000)
    _ = parser.add_argument("--repeats", type=int, default=15)
    _ = parser.add_argument("--kind", action="append", default=[], help="of text; default: all")
    _ = parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    arguments = parser.parse_args()
    if arguments.what == "ids":
        return 1 if compare_ids(arguments.model, arguments.tokens) else 0
    clock = time.process_time if arguments.clock == "cpu" else time.perf_counter
    return 1 if compare_speeds(arguments.model, arguments.repeats, arguments.kind, clock) else 0


if __name__ == "__main__":
    sys.exit(main())
