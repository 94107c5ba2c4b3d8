"""Finds the rewriting of a chat that a template takes without losing a part of it.

OpenAI's and Anthropic's APIs allow chats that templates refuse (two turns of a user in a row) or
render in part (the first of two calls). Whether this one does is seen by rendering the chat with a
mark in place of each text and of each call.
"""

import re
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, cast

from .plain_calls import without_tool_roles
from .turns import (
    Message,
    Turns,
    add_empty_turns,
    arguments_as_text,
    fold_first_system_message,
    fold_system_messages,
    fold_texts_into_results,
    free_stray_results,
    join_neighbours,
    leave_out_empty_answers,
    move_texts_before_calls,
    shorten_ids,
    split_calls,
    texts_as_parts,
)


@dataclass(frozen=True, slots=True)
class Rewriting:
    """A change of a chat's turns, and its description in the request's notes."""

    preference: int
    """The place at which it is tried: the lowest changes least."""
    change: Callable[[Turns], Iterable[Message]]
    note: str


_IN_ORDER: Final = (
    Rewriting(12, without_tool_roles, "calls became the assistant's text and results the user's"),
    Rewriting(3, free_stray_results, "results without calls became the user's text"),
    Rewriting(10, fold_first_system_message, "the system message became part of the user's turn"),
    Rewriting(1, fold_system_messages, "later system messages became part of a user's turn"),
    Rewriting(5, leave_out_empty_answers, "turns of the assistant without text were left out"),
    # Calls are divided after turns are joined: those without results would be joined again.
    Rewriting(4, join_neighbours, "turns of one role in a row were joined"),
    Rewriting(6, split_calls, "calls of one turn got turns of their own"),
    Rewriting(7, fold_texts_into_results, "text after a tool's result became part of it"),
    Rewriting(8, move_texts_before_calls, "text beside calls got a turn of its own"),
    Rewriting(9, add_empty_turns, "empty turns were put between two of one side"),
    Rewriting(2, shorten_ids, "ids of calls became nine letters or digits"),
    Rewriting(11, arguments_as_text, "arguments of calls became text"),
    Rewriting(13, texts_as_parts, "texts became lists of parts"),
)
"""The order in which they are applied."""
BY_PREFERENCE: Final = tuple(sorted(_IN_ORDER, key=lambda each: each.preference))


def rewrite(messages: Turns, rewritings: Collection[Rewriting]) -> Turns:
    """The messages after these rewritings."""
    for rewriting in _IN_ORDER:
        if rewriting in rewritings:
            messages = list(rewriting.change(messages))
    return messages


def needed_rewritings(messages: Turns, faults: Callable[[Turns], float]) -> Sequence[Rewriting]:
    """The rewritings without any of which a template loses more of these messages; none if it
    loses no less with them.

    One after the other is added until nothing is lost, and then each is left out that can be.
    `faults`: the number of parts that the template loses, repeats or moves; infinite if it refuses
    them. It is called at most `1 + 2 * len(BY_PREFERENCE)` times.
    """
    fewest, current = faults(messages), messages
    chosen = added = frozenset[Rewriting]()
    for rewriting in BY_PREFERENCE:
        if not fewest:
            break
        added |= {rewriting}
        candidate = rewrite(messages, added)
        if candidate != current and (count := faults(candidate)) < fewest:
            fewest, chosen = count, added
        current = candidate
    current = rewrite(messages, chosen)
    for rewriting in reversed(BY_PREFERENCE):
        if rewriting in chosen:
            candidate = rewrite(messages, chosen - {rewriting})
            if candidate == current or faults(candidate) <= fewest:
                current, chosen = candidate, chosen - {rewriting}
    return [each for each in BY_PREFERENCE if each in chosen]


class MarkedChat:
    """A chat with a mark in place of each text and in the arguments of each call.

    Blank texts stay, as templates ask for them; so do roles, names and images.
    """

    def __init__(self, messages: Turns) -> None:
        self._salt = f"{secrets.randbits(64):x}"
        self._rounds: list[int] = []
        """The round of each mark: a message, or calls with their results."""
        self._round = -1
        self.messages: Turns = [self._marked(message) for message in messages]
        system = bool(messages) and messages[0].get("role") == "system"
        self._free = self._rounds.count(0) if system else 0
        """Marks of the first system message, whose place is the template's choice: some have it in
        the last turn of the user."""

    def faults(self, text: str) -> int:
        """The parts of the chat that a rendered `text` lacks or repeats, and 1 if others moved."""
        places = [int(place) for place in re.findall(rf"q{self._salt}q(\d+)q", text)]
        counts = Counter(places)
        lost = sum(not counts[mark] for mark in range(self._free))
        lost += sum(counts[mark] != 1 for mark in range(self._free, len(self._rounds)))
        rounds = [self._rounds[place] for place in places if place >= self._free]
        return lost + (rounds != sorted(rounds))

    def _marked(self, message: Message) -> Message:
        self._round += message.get("role") != "tool"
        marked = {**message, "content": self._marked_content(message.get("content"))}
        if message.get("reasoning_content"):
            marked["reasoning_content"] = "r"
        if calls := cast("list[Message] | None", message.get("tool_calls")):
            marked["tool_calls"] = [self._marked_call(call) for call in calls]
        return marked

    def _marked_content(self, content: object) -> object:
        if isinstance(content, list):
            parts = cast("list[Message]", content)
            return [
                {**part, "text": self._marked_content(part["text"])} if "text" in part else part
                for part in parts
            ]
        return self._mark() if isinstance(content, str) and content.strip() else content

    def _marked_call(self, call: Message) -> Message:
        function: Message = call["function"]
        mark = self._mark()
        arguments = mark if isinstance(function.get("arguments"), str) else {"a": mark}
        return {**call, "function": {**function, "arguments": arguments}}

    def _mark(self) -> str:
        self._rounds.append(self._round)
        return f"q{self._salt}q{len(self._rounds) - 1}q"
