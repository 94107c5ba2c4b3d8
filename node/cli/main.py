"""The `exo-node` command: start, chat, status, models, stop; others are in `node/cli_*.py`.

Data goes to stdout, notes to stderr, no colours anywhere. With `--json` an error is a JSON object,
the last line on stderr. Exit codes: 0 done, 1 failed, 2 wrong use or settings, 69 no node runs, 75
try again later, 130 interrupted. Each command imports what it needs when it runs, so that `--help`
and shell completion answer at once.
"""

import io
import json
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from typer.core import TyperGroup

from ...placement.errors import ExoNodeError
from . import flags
from .bench import bench
from .doctor import doctor
from .failures import failure_of, unfinished, wants_json
from .flags import AsJson, DataDir, LocalPort, client_settings
from .join import add_join_commands
from .later import Later
from .report import report
from .service import service
from .start import VARIABLES, start
from .token import token
from .unload import models

if TYPE_CHECKING:
    from pathlib import Path

    from .client import Endpoint

_AS_JSON: Final = "exo-node.as-json"
_DEMO: Final = "demo"
_CHAT: Final = "/v1/chat/completions"


_ORDER: Final = (
    *("start", "chat", "status", "models", "top", "dashboard", "stop"),
    *("nodes", "approve", "deny", "join", "key", "leave", "rekey"),
    "token",
    *("plan", "events", "service", "doctor", "report", "verify", "bench"),
)
"""As people come to need them."""


class _Commands(TyperGroup):
    """The CLI's one edge: an error of the tree becomes a line on stderr and an exit code."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.commands = self._later = Later(commands)
        self._lists = False

    def list_commands(self, ctx: Any) -> list[str]:
        names = list(self._later)
        return sorted(names, key=lambda name: _ORDER.index(name) if name in _ORDER else len(_ORDER))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if self._lists and cmd_name in self._later:
            return self._later.shown(cmd_name)
        return super().get_command(ctx, cmd_name)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        self._lists = True
        try:
            super().format_commands(ctx, formatter)
        finally:
            self._lists = False

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta[_AS_JSON] = wants_json(self, args)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except ExoNodeError as error:
            failure = failure_of(error)
            as_json = ctx.meta[_AS_JSON]
            _note(failure.as_json() if as_json else f"exo-node: {failure.sentence()}")
            raise typer.Exit(failure.exit_code) from error
        except Exception as error:
            if not ctx.meta[_AS_JSON] or (failure := unfinished(error)) is None:
                raise  # the parser prints its own errors in words
            _note(failure.as_json())
            raise typer.Exit(failure.exit_code) from error


app = typer.Typer(
    cls=_Commands,
    help="Run large models on the Macs and Linux machines that you own.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
commands = typer.Typer()
"""Of `app`, which builds each when it is asked for."""
commands.add_typer(bench, name="bench")
commands.add_typer(models, name="models")
commands.add_typer(service, name="service")
commands.add_typer(token, name="token")
commands.command()(doctor)
commands.command()(report)
add_join_commands(commands)


def main() -> None:
    """The entry point of `exo-node`."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a character that it has not becomes `?`
            stream.reconfigure(errors="replace")
    app(prog_name="exo-node")


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"exo-node {version('exo-node')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Run large models on the Macs and Linux machines that you own."""


commands.command(epilog=VARIABLES)(start)


@commands.command()
def chat(
    prompt: flags.Prompt = None,
    model: flags.ChatModel = None,
    max_tokens: flags.MaxTokens = None,
    temperature: flags.Temperature = None,
    num_draft_tokens: flags.NumDraftTokens = None,
    port: LocalPort = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Ask the node one question, or, without PROMPT on a terminal, have a conversation.

    The answer streams to stdout; its numbers follow on stderr.
    """
    from . import client as cli_client

    settings = client_settings(port, data_dir)
    given = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "num_draft_tokens": num_draft_tokens,
    }
    options = {key: value for key, value in given.items() if value is not None}
    if prompt is None and not as_json and sys.stdin.isatty():
        _converse(cli_client.locate(settings), model, options, settings.data_dir)
        return
    text = sys.stdin.read() if prompt in (None, "-") else prompt
    if not text.strip():
        raise typer.BadParameter("the prompt is empty", param_hint="PROMPT")
    endpoint = cli_client.locate(settings)
    messages = [{"role": "user", "content": text}]
    body = {"model": model or _pick_model(endpoint), "messages": messages, **options}
    if as_json:
        _print_json(cli_client.call(endpoint, _CHAT, body, timeout_s=None))
    else:
        _stream_answer(endpoint, body)


def _converse(
    endpoint: "Endpoint", model: str | None, options: dict[str, Any], folder: "Path"
) -> None:
    from . import client as cli_client
    from . import session as cli_session

    listed = cli_client.call(endpoint, "/v1/models", timeout_s=60).get("data", [])
    models = tuple(str(entry["id"]) for entry in listed if not entry.get("error"))
    session = cli_session.Session(model or _pick_model(endpoint), models, options)
    terminal = cli_session.Terminal(folder, tuple(f"/model {id}" for id in models))
    cli_session.run(session, terminal, lambda body: cli_client.stream(endpoint, _CHAT, body))


def _stream_answer(endpoint: "Endpoint", body: Mapping[str, Any]) -> None:
    from . import client as cli_client
    from . import output as cli_output

    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    stats = cli_output.print_answer(cli_client.stream(endpoint, _CHAT, streamed))
    if stats:
        _note(cli_output.stats_line(stats))


@commands.command()
def status(port: LocalPort = None, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Show the node, its cluster and where models run."""
    from . import client as cli_client

    endpoint = cli_client.locate(client_settings(port, data_dir))
    cluster = cli_client.call(endpoint, "/v1/cluster")
    placements = cli_client.call(endpoint, "/v1/placements").get("data", [])
    answered = cli_client.call(endpoint, "/v1/mtp/stats").get("models", {})
    if as_json:
        _print_json({"cluster": cluster, "placements": placements, "answered": answered})
        return
    from . import output as cli_output

    print(cli_output.status(cluster, placements, answered))


@commands.command()
def top(
    once: flags.Once = False,
    port: LocalPort = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Watch nodes, placements, requests and tokens a second, until Ctrl-C."""
    from .top import run_top

    run_top(client_settings(port, data_dir), once=once, as_json=as_json)


@commands.command()
def events(
    follow: flags.Follow = False,
    limit: flags.Limit = 100,
    own: flags.Own = False,
    port: LocalPort = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Show what happened in the cluster, one line each."""
    from . import client as cli_client
    from . import events as cli_events

    endpoint = cli_client.locate(client_settings(port, data_dir))
    cli_events.print_events(endpoint, follows=follow, limit=limit, own=own, as_json=as_json)


@commands.command()
def verify(
    model: flags.VerifiedModel = _DEMO,
    k: flags.Depth = None,
    dtype: flags.Dtype = None,
    quick: flags.Quick = False,
    json_file: flags.Report = None,
    models_dir: flags.ModelsDir = None,
) -> None:
    """Check that drafts change no answer of a model on this machine.

    Exit status 1 where they do by more than rounding explains. No node has to run.
    """
    from .verify import run_verify

    raise typer.Exit(
        run_verify(model, k=k, dtype=dtype, quick=quick, json_file=json_file, models_dir=models_dir)
    )


@commands.command()
def plan(
    model: flags.PlannedModel,
    min_nodes: flags.MinNodes = None,
    max_nodes: flags.MaxNodes = None,
    context: flags.Context = None,
    nodes: flags.Nodes = None,
    layers: flags.Layers = None,
    exclude: flags.Exclude = None,
    port: LocalPort = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Show where a model would be placed, what comes next and why; nothing is loaded."""
    from . import client as cli_client
    from . import plan as cli_plan

    options = {
        "min_nodes": min_nodes,
        "max_nodes": max_nodes,
        "context": context,
        "nodes": nodes,
        "layers": layers,
        "exclude": exclude,
    }
    endpoint = cli_client.locate(client_settings(port, data_dir))
    preview = cli_client.call(endpoint, cli_plan.query(model, options))
    if as_json:
        _print_json(preview)
        return
    print(cli_plan.told(preview))


@commands.command()
def stop(data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """End the node on the data folder, and wait for its end."""
    from .start import stop_node

    pid = stop_node(client_settings(None, data_dir).data_dir, _note)
    if as_json:
        _print_json({"stopped": True, "pid": pid})
    else:
        _note(f"stopped the node with pid {pid}")


def _pick_model(endpoint: "Endpoint") -> str:
    from .client import call

    entries: list[dict[str, Any]] = call(endpoint, "/v1/models", timeout_s=60).get("data", [])
    for entry in entries:
        if entry.get("loaded"):
            return str(entry["id"])
    own = [e for e in entries if not (e.get("error") or e.get("profile_of"))]
    fitting = [e for e in own if e.get("fits") and e["fits"]["nodes"]]
    if others := [entry for entry in fitting if entry["id"] != _DEMO]:
        chosen = max(others, key=lambda entry: (entry.get("size_bytes") or 0, str(entry["id"])))
        _note(f"no model is loaded: using {chosen['id']}, the largest on disk that fits")
        return str(chosen["id"])
    _note(
        f"no model is loaded: using the small {_DEMO} model; `exo-node models recommend` names "
        "real ones that fit, and `exo-node models pull` gets one"
    )
    return _DEMO


def _print_json(value: Mapping[str, Any]) -> None:
    print(json.dumps(value, indent=2))


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
