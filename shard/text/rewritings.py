"""Finds the rewriting of a chat that a template takes without losing a part of it.

OpenAI's and Anthropic's APIs allow chats that templates refuse (two turns of a user in a row) or
render in part (the first of two calls). Whether this one does is seen by rendering the chat with a
mark in place of each text and of each call.
"""

import hashlib
import json
import re
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Final, cast

from .messages import joined_contents
from .plain_calls import result_as_text, without_tool_roles

Message = Mapping[str, Any]
Turns = Sequence[Message]

_BETWEEN = "\n\n"
"""Separates texts that become one turn."""


def fold_system_messages(messages: Turns) -> list[Message]:
    """Folds each later system message into the end of the user's turn before it, or else into the
    start of the next one, or into a turn of its own.

    At the front they would change the beginning of every later prompt, and no prefix cache would
    match.
    """
    converted: list[Message] = []
    pending: list[object] = []
    for number, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        if number and role == "system":
            if converted and converted[-1].get("role") == "user" and not pending:
                converted[-1] = _extended(converted[-1], content)
            else:
                pending.append(content)
            continue
        if pending and role == "user":
            message = {**message, "content": joined_contents(_BETWEEN, *pending, content)}
        elif pending:
            converted.append({"role": "user", "content": joined_contents(_BETWEEN, *pending)})
        pending = []
        converted.append(message)
    if pending:
        converted.append({"role": "user", "content": joined_contents(_BETWEEN, *pending)})
    return converted


def join_neighbours(messages: Turns) -> list[Message]:
    """Joins turns of one role in a row, but not what an assistant wrote after its calls."""
    converted: list[Message] = []
    for message in messages:
        if converted and _is_joinable(converted[-1], message):
            before = converted.pop()
            calls = [*(before.get("tool_calls") or ()), *(message.get("tool_calls") or ())]
            thoughts = _joined_thoughts(before, message)
            message = _extended({**before, **thoughts}, message.get("content"))
            message = {**message, "tool_calls": calls} if calls else message
        converted.append(message)
    return converted


def _joined_thoughts(*messages: Message) -> Message:
    thoughts = joined_contents(_BETWEEN, *(each.get("reasoning_content") for each in messages))
    return {"reasoning_content": thoughts} if thoughts else {}


def _is_joinable(before: Message, message: Message) -> bool:
    role = message.get("role")
    if role != before.get("role") or role not in ("user", "assistant"):
        return False
    if role == "user":
        return True
    texts = isinstance(before.get("content"), str) and isinstance(message.get("content"), str)
    return texts and not (before.get("tool_calls") and has_text(message))


def fold_texts_into_results(messages: Turns) -> list[Message]:
    """Adds a user's text after a tool's result to that result; images need turns of a user."""
    converted: list[Message] = []
    for message in messages:
        after_result = bool(converted) and converted[-1].get("role") == "tool"
        content = message.get("content")
        if after_result and message.get("role") == "user" and isinstance(content, str):
            converted[-1] = _extended(converted[-1], content)
        else:
            converted.append(message)
    return converted


def free_stray_results(messages: Turns) -> Iterator[Message]:
    """Makes results that follow no calls a user's text: a shortened chat may lack their calls."""
    follows_calls = False
    for message in messages:
        is_result = message.get("role") == "tool"
        if is_result and not follows_calls:
            message = result_as_text(message)
        follows_calls = (is_result and follows_calls) or bool(message.get("tool_calls"))
        yield message


def split_calls(messages: Turns) -> Iterator[Message]:
    """Gives each call a turn of its own, followed by its result."""
    rest = list(messages)
    while rest:
        message = rest.pop(0)
        calls = cast("list[Message]", message.get("tool_calls") or [])
        if len(calls) < 2:
            yield message
            continue
        results = list[Message]()
        while rest and rest[0].get("role") == "tool":
            results.append(rest.pop(0))
        for call in calls:
            yield {**message, "tool_calls": [call]}
            yield from _take_result(results, call.get("id"))
            message = {"role": "assistant", "content": ""}
        yield from results


def _take_result(results: list[Message], call_id: object) -> list[Message]:
    """The first result of a call, removed from `results`; without ids the first one."""
    for number, result in enumerate(results):
        if result.get("tool_call_id") in (None, call_id):
            return [results.pop(number)]
    return []


def shorten_ids(messages: Turns) -> Iterator[Message]:
    """Gives calls and results ids of nine letters or digits, equal where they were equal.

    Those without an id are numbered: the first result is of the first call.
    """
    calls, results = count(), count()
    for message in messages:
        if message.get("role") == "tool":
            message = {**message, "tool_call_id": _short(message.get("tool_call_id"), results)}
        elif listed := cast("list[Message] | None", message.get("tool_calls")):
            short = [{**call, "id": _short(call.get("id"), calls)} for call in listed]
            message = {**message, "tool_calls": short}
        yield message


def _short(name: object, numbers: Iterator[int]) -> str:
    text = name if isinstance(name, str) and name else f"{next(numbers)}"
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()[:9]


def move_texts_before_calls(messages: Turns) -> Iterator[Message]:
    """Gives a text beside calls a turn of its own, before that of the calls."""
    for message in messages:
        if message.get("tool_calls") and has_text(message):
            yield {name: value for name, value in message.items() if name != "tool_calls"}
            message = {"role": "assistant", "content": "", "tool_calls": message["tool_calls"]}
        yield message


def leave_out_empty_answers(messages: Turns) -> Iterator[Message]:
    """Drops an assistant's turns without text and calls, except one that comes last."""
    for number, message in enumerate(messages, start=1):
        is_answer = message.get("role") == "assistant" and number < len(messages)
        if not is_answer or message.get("tool_calls") or has_text(message):
            yield message


def add_empty_turns(messages: Turns) -> Iterator[Message]:
    """Puts an empty turn of the other side between two of one side, and before an assistant's
    first; calls and their results are the assistant's side, and calls of several turns are one."""
    before: Message = {}
    for message in messages:
        role, role_before = message.get("role"), before.get("role")
        calls = bool(before.get("tool_calls"))
        follows = role_before in (None, "system", "assistant")
        if role == "assistant" and follows and not (calls and message.get("tool_calls")):
            yield {"role": "user", "content": ""}
        elif role == "user" and (role_before == "tool" or calls):
            yield {"role": "assistant", "content": ""}
        yield message
        before = message


def fold_first_system_message(messages: Turns) -> Turns:
    """Makes the system message the beginning of the user's first turn."""
    if not messages or messages[0].get("role") != "system":
        return messages
    system, *rest = messages
    as_user: Message = {"role": "user", "content": system.get("content")}
    if rest and rest[0].get("role") == "user":
        return [_extended({**rest[0], **as_user}, rest[0].get("content")), *rest[1:]]
    return [as_user, *rest]


def arguments_as_text(messages: Turns) -> Iterator[Message]:
    """Makes the arguments of each call their JSON text, for templates that print them as such."""
    for message in messages:
        if calls := cast("list[Message] | None", message.get("tool_calls")):
            message = {**message, "tool_calls": [_with_text(call) for call in calls]}
        yield message


def _with_text(call: Message) -> Message:
    function: Message = call["function"]
    arguments: object = function.get("arguments")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}


def texts_as_parts(messages: Turns) -> Iterator[Message]:
    """Makes each text a list of one part, for templates that iterate over parts."""
    for message in messages:
        if isinstance(content := message.get("content"), str):
            message = {**message, "content": [{"type": "text", "text": content}]}
        yield message


def has_text(message: Message) -> bool:
    """Whether a message has a content other than blank text."""
    content: object = message.get("content")
    return bool(content.strip()) if isinstance(content, str) else bool(content)


def _extended(message: Message, *contents: object) -> Message:
    """The message with these contents after its own."""
    return {**message, "content": joined_contents(_BETWEEN, message.get("content"), *contents)}


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
        if candidate != current and (lost := faults(candidate)) < fewest:
            fewest, chosen = lost, added
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
