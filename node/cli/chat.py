"""`exo-node chat`: one question, or a conversation on the terminal."""

import os
import sys
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Protocol

import typer

from ...placement.errors import ExoNodeError
from ..machine.log import escape_controls
from .client import ApiEndpoint, Comment, call, client_settings, locate, stream
from .flags import AsJson, DataDir, LocalPort, argument, models_on_disk, option
from .output import note, print_answer, print_json, stats_line

if TYPE_CHECKING:
    from prompt_toolkit.history import History

Json = dict[str, Any]
Ask = Callable[[Mapping[str, Any]], Iterable[Json | Comment]]
"""Streams the answer to a request's body."""

_DEMO: Final = "demo"
_CHAT: Final = "/v1/chat/completions"
HISTORY: Final = "chat_history"
HELP: Final = """\
/help                what you are reading
/model [ID]          the model that answers, or another one
/system [TEXT]       the system prompt; without TEXT none
/set [NAME VALUE]    temperature, top_p, top_k, min_p, max_tokens, seed or num_draft_tokens
                     (drafts a round, 0 for none); - takes it back
/stats               the last answer's numbers
/clear               a new conversation
/quit                the end, as is Ctrl-D
Ctrl-C ends the answer, not the session. Alt-Enter begins a new line."""
_K: Final = "num_draft_tokens"
_SET: Final = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", _K)

_Prompt = Annotated[
    list[str] | None,
    argument(
        "[PROMPT]",
        "What to ask; - or a pipe: stdin says. On a terminal nothing begins a conversation.",
        show_default=False,
    ),
]
_Model = Annotated[
    str | None,
    option(
        "ID",
        "A model's id; default: the loaded one, else the largest that fits.",
        autocompletion=models_on_disk,
    ),
]
_MaxTokens = Annotated[int | None, option("N", "Stop after that many.", min=1)]
_Temperature = Annotated[float | None, option("T", "0 is greedy; default: the model's.", min=0)]
_NumDraftTokens = Annotated[
    int | None, option("K", "Drafts a round; 0 is off; default: the model's.", min=0)
]


def chat(
    prompt: _Prompt = None,
    model: _Model = None,
    max_tokens: _MaxTokens = None,
    temperature: _Temperature = None,
    num_draft_tokens: _NumDraftTokens = None,
    port: LocalPort = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Ask the node, or have a conversation on the terminal.

    Without PROMPT a conversation begins. The answer streams to stdout; its numbers follow on
    stderr.
    """
    if prompt and len(prompt) > 1:
        raise typer.BadParameter("put it in quotes, a model behind --model", param_hint="PROMPT")
    text = prompt[0] if prompt else None
    settings = client_settings(port, data_dir)
    flags = {"max_tokens": max_tokens, "temperature": temperature, _K: num_draft_tokens}
    options = {name: value for name, value in flags.items() if value is not None}
    if text is None and not as_json and sys.stdin.isatty():
        _converse(locate(settings), model, options, settings.data_dir)
        return
    text = sys.stdin.read() if text in (None, "-") else text
    if not text.strip():
        raise typer.BadParameter("the prompt is empty", param_hint="PROMPT")
    endpoint = locate(settings)
    messages = [{"role": "user", "content": text}]
    body = {"model": model or _pick_model(endpoint), "messages": messages, **options}
    if as_json:
        print_json(call(endpoint, _CHAT, body, timeout_s=None))
    elif stats := print_answer(stream(endpoint, _CHAT, _streamed(body))):
        note(stats_line(stats))


def _streamed(body: Json) -> Json:
    return {**body, "stream": True, "stream_options": {"include_usage": True}}


def _pick_model(endpoint: ApiEndpoint) -> str:
    listed: list[Json] = call(endpoint, "/v1/models", timeout_s=60).get("data", [])
    entries = [e for e in listed if "embeddings" not in (e.get("capabilities") or ())]
    for entry in entries:
        if entry.get("loaded"):
            return str(entry["id"])
    own = [e for e in entries if not (e.get("error") or e.get("profile_of"))]
    fitting = [e for e in own if e.get("fits") and e["fits"]["nodes"]]
    if others := [entry for entry in fitting if entry["id"] != _DEMO]:
        largest = max(others, key=lambda entry: (entry.get("size_bytes") or 0, str(entry["id"])))
        note(f"no model is loaded: using {largest['id']}, the largest on disk that fits")
        return str(largest["id"])
    note(
        f"no model is loaded: using the small {_DEMO} model; `exo-node models recommend` names "
        "real ones that fit, and `exo-node models pull` gets one"
    )
    return _DEMO


# ------------------------------------------------------------------------ a conversation


def _converse(endpoint: ApiEndpoint, model: str | None, options: Json, folder: Path) -> None:
    entries = call(endpoint, "/v1/models", timeout_s=60).get("data", [])
    models = tuple(str(entry["id"]) for entry in entries if not entry.get("error"))
    session = ChatSession(model or _pick_model(endpoint), models, options)
    terminal = Terminal(folder, tuple(f"/model {id}" for id in models))
    run(session, terminal, lambda body: stream(endpoint, _CHAT, body))


class EndSession(Exception):
    """The person ends the session."""


class Lines(Protocol):
    """A source of the person's lines."""

    def read(self, prompt: str) -> str:
        """The next line. Raises EOFError at the end, KeyboardInterrupt for Ctrl-C."""
        ...


@dataclass
class ChatSession:
    """The messages of a conversation, and the options of its next request."""

    model: str
    models: tuple[str, ...] = ()
    options: Json = field(default_factory=dict[str, Any])
    system: str = ""
    messages: list[Json] = field(default_factory=list[Json])
    stats: Mapping[str, Any] | None = None

    def body(self) -> Json:
        first = [{"role": "system", "content": self.system}] if self.system else []
        messages = [*first, *self.messages]
        return _streamed({"model": self.model, "messages": messages, **self.options})

    def command(self, line: str) -> str:
        """Carries out a line that begins with a slash; returns the reply. Raises EndSession."""
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
            case "stats":
                return stats_line(self.stats) if self.stats else "nothing was answered yet"
            case "clear":
                self.messages.clear()
                return "a new conversation"
            case "quit" | "exit" | "bye":
                raise EndSession
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
            options = ", ".join(f"{name} {value}" for name, value in self.options.items())
            return options or "everything is the model's own"
        if len(words) != 2 or words[0] not in _SET:
            return f"/set NAME VALUE, with one of {', '.join(_SET)}"
        name, text = words
        if text == "-":
            _ = self.options.pop(name, None)
            return f"{name} is the model's own"
        try:
            self.options[name] = float(text) if "." in text else int(text)
        except ValueError:
            return f"{escape_controls(text)} is no number"
        return f"{name} is {self.options[name]}"


def run(session: ChatSession, lines: Lines, ask: Ask) -> None:
    """Runs until the person ends the session; an answer that fails does not end it."""
    note(f"{session.model} answers; /help lists the commands, Ctrl-D ends the session")
    while True:
        try:
            text = lines.read("> ")
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
            note(*session.command(text).splitlines())
        except EndSession:
            return


def _answer(session: ChatSession, text: str, ask: Ask) -> None:
    """Prints the answer. A question without one is dropped: most templates refuse two in a row."""
    session.messages.append({"role": "user", "content": text})
    deltas: list[str] = []
    try:
        session.stats = print_answer(_recorded(ask(session.body()), deltas)) or session.stats
    except KeyboardInterrupt:
        note("stopped")
    except ExoNodeError as error:
        note(f"exo-node: {error.message}")
    if deltas:
        session.messages.append({"role": "assistant", "content": "".join(deltas)})
    else:
        _ = session.messages.pop()


def _recorded(
    events: Iterable[Json | Comment], deltas: list[str]
) -> Generator[Json | Comment, None, None]:
    """Yields the events and appends the text of each to `deltas`."""
    for event in events:
        if not isinstance(event, Comment):
            for choice in event.get("choices", []):
                if content := choice.get("delta", {}).get("content"):
                    deltas.append(content)
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
    """The history in the node's data folder; one of this session only where there is no folder."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    if not folder.is_dir():
        return InMemoryHistory()
    path = folder / HISTORY
    os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))  # private before it is written to
    return FileHistory(str(path))
