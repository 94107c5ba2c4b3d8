"""Conversations with real nodes: a demo model with a longer context, and timed turns."""

import json
import random
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from engines import DEMO
from nodes import Node

MODEL = "demo-long"
CONTEXT = 16_384
_SENTENCE = "The {} {} went to the {} with a {} and saw a {} there. "
_TOKENS_OF_SENTENCE = 19
_TEXT = (
    "big small red old happy little funny dog cat boy girl bird tree house garden park ball boat "
    "fish king mother friend forest river hill box hat flower bear rabbit"
)
_WORDS = tuple(_TEXT.split())

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class TurnAnswer:
    """The answer to one turn. Times are of one monotonic clock, in seconds."""

    began_at: float
    first_at: float
    text: str
    ids: tuple[int, ...]
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    stats: Mapping[str, Any] = field(repr=False)

    @property
    def ttft_s(self) -> float:
        return self.first_at - self.began_at


def long_model(folder: Path, context: int = CONTEXT) -> tuple[str, ...]:
    """Copies the demo model into `folder` and gives it a longer context. Returns a node's flags."""
    copy = shutil.copytree(DEMO, folder / MODEL)
    config = json.loads((copy / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = context
    _ = (copy / "config.json").write_text(json.dumps(config))
    return ("--dtype", "float32", "--models-dir", str(folder))


def words(tokens: int, seed: str) -> str:
    """Simple sentences of about `tokens` tokens; two seeds differ within the first one."""
    draw = random.Random(seed)
    count = max(1, tokens // _TOKENS_OF_SENTENCE)
    return "".join(_SENTENCE.format(*draw.choices(_WORDS, k=5)) for _ in range(count))


def with_answer(messages: Sequence[Message], answer: str, next_turn: str) -> list[Message]:
    """The messages of the next turn's request."""
    return [
        *messages,
        {"role": "assistant", "content": answer},
        {"role": "user", "content": next_turn},
    ]


def ask(running: Node, messages: Sequence[Message], tokens: int, **fields: Any) -> TurnAnswer:
    """Streams one greedy answer. Raises RuntimeError if it ends without its statistics."""
    body = {"model": MODEL, "messages": messages, "max_tokens": tokens, "return_token_ids": True}
    began_at, first_at, text, ids = time.perf_counter(), 0.0, "", list[int]()
    last: dict[str, Any] = {}
    with running.stream("", **(body | fields)) as events:
        for event in events:
            if event == "[DONE]":
                break
            last |= {
                name: event[name]
                for name in ("generation_stats", "usage", "error")
                if event.get(name)
            }
            for choice in event.get("choices", ()):
                delta = choice["delta"].get("content") or ""
                if (delta or choice.get("token_ids")) and not first_at:
                    first_at = time.perf_counter()
                text += delta
                ids += choice.get("token_ids") or ()
    if "error" in last or "generation_stats" not in last:
        raise RuntimeError(f"no answer: {last.get('error', 'the stream ended early')}")
    return TurnAnswer(
        began_at,
        first_at,
        text,
        tuple(ids),
        last["usage"]["prompt_tokens"],
        last["generation_stats"]["cached_tokens"],
        last["usage"]["completion_tokens"],
        last["generation_stats"],
    )
