"""The conversations of a bench: prompts of a given length, questions, and traces of agents.

Everything follows from a seed, so two servers get the same requests. No two conversations share a
prefix, except the system prompt of the agents of one run, as with real agents.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from math import ceil
from typing import Any, Final, Literal

Role = Literal["user", "tool"]
AGENT: Final = "agent"
QUESTIONS: Final = "questions"
_TEXT: Final = (
    "about after again air all animal answer away back before big boat book boy bring build call "
    "cat child city close cold come cook count country cross day dog door down draw drink earth "
    "eat end every eye face family farm fast father feet find fire first fish five flower follow "
    "food foot four friend garden girl give good grass great green ground grow hand hard head "
    "hear help high hill home horse house idea keep kind king land large last late learn leave "
    "letter light line list little live long look made make many moon morning mother mountain"
)
_WORDS: Final = tuple(_TEXT.split())


@dataclass(frozen=True, slots=True)
class Calibration:
    """Tokens of a conversation by its words: `fixed` for the template, `each` for every word.

    `source`: from the server's usage, or the assumption of one token for each word.
    """

    fixed: float = 0.0
    each: float = 1.0
    source: Literal["usage", "assumed"] = "assumed"

    @classmethod
    def between(cls, few: tuple[int, int], many: tuple[int, int]) -> "Calibration":
        """The calibration by two prompts, each as (words, tokens)."""
        (w0, t0), (w1, t1) = few, many
        if w1 <= w0 or t1 <= t0:
            return cls()
        each = (t1 - t0) / (w1 - w0)
        return cls(t0 - each * w0, each, "usage")

    def words(self, tokens: int, *, whole: bool) -> int:
        """The number of words for `tokens` tokens; `whole`: they include the template's."""
        content_tokens = tokens - self.fixed if whole else tokens
        return max(1, round(content_tokens / self.each))


@dataclass(frozen=True, slots=True)
class TurnMessage:
    """A message to the model before its next answer."""

    role: Role
    text: str


@dataclass(frozen=True, slots=True)
class Conversation:
    """Successive turns; the server's own answers come between them."""

    turns: tuple[TurnMessage, ...]
    system: str = ""

    def messages(self, answers: Sequence[str]) -> list[dict[str, Any]]:
        """The messages of the request after these answers."""
        messages: list[dict[str, Any]] = []
        if self.system:
            messages.append({"role": "system", "content": self.system})
        for number, turn in enumerate(self.turns[: len(answers) + 1]):
            message: dict[str, Any] = {"role": turn.role, "content": turn.text}
            if turn.role == "tool":
                message["tool_call_id"] = f"call_{number}"
            messages.append(message)
            if number < len(answers):
                messages.append({"role": "assistant", "content": answers[number]})
        return messages


@dataclass(frozen=True, slots=True)
class Workload:
    """One kind of request: a prompt of `tokens`, an agent's conversation, or a question."""

    name: str
    tokens: int = 0
    """The length of the prompt, or of an agent's system prompt."""
    questions: tuple[str, ...] = ()
    """Each is asked after a number, so that no prefix cache contains it."""
    turns: int = 1
    tool_tokens: int = 0
    tool_role: Role = "tool"

    def conversations(self, calibration: Calibration, count: int, seed: str) -> list[Conversation]:
        rng = random.Random(seed)
        if self.questions:
            from_here = rng.randrange(len(self.questions))
            questions = islice(cycle(self.questions), from_here, from_here + count)
            return [
                Conversation((TurnMessage("user", f"{rng.randrange(1000, 10000)}. {question}"),))
                for question in questions
            ]
        if self.turns == 1:
            words = calibration.words(self.tokens, whole=True)
            return [Conversation((TurnMessage("user", _text(rng, words)),)) for _ in range(count)]
        system = _text(rng, calibration.words(self.tokens, whole=False))
        return [Conversation(tuple(self._agent(rng, calibration)), system) for _ in range(count)]

    def needed(self, requests: int) -> int:
        """The number of conversations with at least `requests` requests."""
        return ceil(requests / self.turns)

    def _agent(self, rng: random.Random, calibration: Calibration) -> Iterator[TurnMessage]:
        """The turns of an agent: a user's task, then a tool's result before each further answer."""
        yield TurnMessage("user", _text(rng, calibration.words(32, whole=False)))
        result = calibration.words(self.tool_tokens, whole=False)
        for _ in range(self.turns - 1):
            yield TurnMessage(self.tool_role, _text(rng, result))


def probe_text(words: int) -> str:
    return _text(random.Random("calibration"), words)


def _text(rng: random.Random, words: int) -> str:
    return " ".join(rng.choices(_WORDS, k=words))
