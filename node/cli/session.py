"""`exo-node chat` without a prompt: a conversation on the terminal, with commands."""

import json
import os
import sys
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from ...placement.errors import ExoNodeError
from ..machine.log import escape_controls
from .client import Comment
from .output import print_answer, stats_line

if TYPE_CHECKING:
    from prompt_toolkit.history import History

Json = dict[str, Any]
Ask = Callable[[Mapping[str, Any]], Iterable[Json | Comment]]
"""Streams the answer to a request's body."""

HISTORY: Final = "chat_history"
HELP: Final = """\
/help                what you are reading
/model [ID]          the model that answers, or another one
/system [TEXT]       the system prompt; without TEXT none
/set [NAME VALUE]    temperature, top_p, top_k, min_p, max_tokens or seed; - takes it back
/k [N]               tokens drafted a round, 0 for none; without N the model's own
/stats               the last answer's numbers
/clear               a new conversation
/save FILE           what was said, as JSON
/quit                the end, as is Ctrl-D
Ctrl-C ends the answer, not the session. Alt-Enter begins a new line; a text of several lines may
also stand between lines of \"\"\"."""
_NUMBERS: Final[Mapping[str, type[int] | type[float]]] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "max_tokens": int,
    "seed": int,
}
_FENCE: Final = '"""'


class End(Exception):
    """The person wants no more."""


class Lines(Protocol):
    """Where a person's lines come from."""

    def read(self, prompt: str) -> str:
        """Raises EOFError at their end, KeyboardInterrupt for Ctrl-C."""
        ...


@dataclass
class Session:
    """What is said, by whom, and how the next answer is asked for."""

    model: str
    models: tuple[str, ...] = ()
    options: Json = field(default_factory=dict[str, Any])
    system: str = ""
    said: list[Json] = field(default_factory=list[Json])
    stats: Mapping[str, Any] | None = None

    def body(self) -> Json:
        """The request for the next answer."""
        first = [{"role": "system", "content": self.system}] if self.system else []
        asked = {"model": self.model, "messages": [*first, *self.said], **self.options}
        return {**asked, "stream": True, "stream_options": {"include_usage": True}}

    def command(self, line: str) -> str:
        """Carries out a line that begins with a slash; what to tell of it. Raises End."""
        name, _, rest = line[1:].strip().partition(" ")
        match name:
            case "help" | "?":
                return HELP
            case "model":
                return self._choose(rest.strip())
            case "system":
                self.system = rest.strip()
                return "the system prompt is set" if self.system else "there is no system prompt"
            case "set":
                return self._set(rest.split())
            case "k":
                return self._number("num_draft_tokens", rest.strip() or "-", int)
            case "stats":
                return stats_line(self.stats) if self.stats else "nothing was answered yet"
            case "clear":
                self.said.clear()
                return "a new conversation"
            case "save":
                return self._save(rest.strip())
            case "quit" | "exit" | "bye":
                raise End
            case _:
                return f"there is no /{escape_controls(name)[:40]}; /help lists the commands"

    def _choose(self, id: str) -> str:
        if not id:
            others = ", ".join(each for each in self.models if each != self.model)
            return f"{self.model} answers" + (f"; there are also {others}" if others else "")
        if self.models and id not in self.models:
            return f"{escape_controls(id)} is not on this cluster; {', '.join(self.models)} are"
        self.model = id
        return f"{id} answers from now on"

    def _set(self, words: list[str]) -> str:
        if not words:
            given = ", ".join(f"{name} {value}" for name, value in self.options.items())
            return given or "everything is the model's own"
        if len(words) != 2 or words[0] not in _NUMBERS:
            return f"/set NAME VALUE, with one of {', '.join(_NUMBERS)}"
        return self._number(words[0], words[1], _NUMBERS[words[0]])

    def _number(self, name: str, text: str, kind: type[int] | type[float]) -> str:
        if text == "-":
            _ = self.options.pop(name, None)
            return f"{name} is the model's own"
        try:
            self.options[name] = kind(text)
        except ValueError:
            return f"{escape_controls(text)} is no {'number' if kind is float else 'whole number'}"
        return f"{name} is {self.options[name]}"

    def _save(self, name: str) -> str:
        if not name:
            return "/save FILE"
        told = {"model": self.model, "system": self.system, "messages": self.said}
        try:
            _ = Path(name).expanduser().write_text(json.dumps(told, indent=2) + "\n")
        except OSError as fault:
            return f"{escape_controls(name)} cannot be written: {fault.strerror}"
        return f"saved as {escape_controls(name)}"


def run(session: Session, lines: Lines, ask: Ask) -> None:
    """Until the person ends it. What goes wrong with one answer does not end the session."""
    _note(f"{session.model} answers; /help lists the commands, Ctrl-D ends the session")
    while True:
        try:
            text = _whole(lines)
        except KeyboardInterrupt:
            continue
        except EOFError:
            return
        if not text.strip():
            continue
        if not text.startswith("/"):
            _answer(session, text, ask)
            continue
        try:
            _note(session.command(text))
        except End:
            return


def _whole(lines: Lines) -> str:
    """One message: a line, or the lines between two of triple quotes."""
    line = lines.read("> ")
    if not line.lstrip().startswith(_FENCE):
        return line
    parts = [line.lstrip().removeprefix(_FENCE)]
    while not parts[-1].rstrip().endswith(_FENCE):
        parts.append(lines.read(". "))
    parts[-1] = parts[-1].rstrip().removesuffix(_FENCE)
    return "\n".join(parts).strip("\n")


def _answer(session: Session, text: str, ask: Ask) -> None:
    """A question that got no answer is not kept: two in a row are refused by most templates."""
    session.said.append({"role": "user", "content": text})
    heard: list[str] = []
    try:
        session.stats = print_answer(_overheard(ask(session.body()), heard)) or session.stats
    except KeyboardInterrupt:
        _note("stopped")
    except ExoNodeError as error:
        _note(f"exo-node: {error.message}")
    if heard:
        session.said.append({"role": "assistant", "content": "".join(heard)})
    else:
        _ = session.said.pop()


def _overheard(
    events: Iterable[Json | Comment], heard: list[str]
) -> Generator[Json | Comment, None, None]:
    for event in events:
        if not isinstance(event, Comment):
            for choice in event.get("choices", []):
                if said := choice.get("delta", {}).get("content"):
                    heard.append(said)
        yield event


class Terminal:
    """Lines that a person edits, with the history of earlier sessions."""

    def __init__(self, folder: Path, words: tuple[str, ...]) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import WordCompleter

        commands = [word for word in HELP.split() if word.startswith("/")]
        completer = WordCompleter([*commands, *words], sentence=True)
        self._session: PromptSession[str] = PromptSession(
            history=_history(folder), completer=completer, complete_while_typing=False
        )

    def read(self, prompt: str) -> str:
        return self._session.prompt(prompt)


def _history(folder: Path) -> "History":
    """Kept in the node's data folder; for this session only where there is none."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    if not folder.is_dir():
        return InMemoryHistory()
    path = folder / HISTORY
    # What somebody asked is nobody else's to read.
    os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    return FileHistory(str(path))


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
