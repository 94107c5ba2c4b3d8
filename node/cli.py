"""The `exo-node` command: start, chat, status, models, stop; others are in `node/cli_*.py`.

Data goes to stdout, notes to stderr, no colours anywhere. Exit codes: 0 done, 1 failed, 2 wrong
use or settings, 69 no node runs, 75 try again later, 130 interrupted. Each command imports what
it needs when it runs, so that `--help` and shell completion answer at once.
"""

import io
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from typer.core import TyperGroup

from ..placement.errors import ExoNodeError, InvalidSettings
from .cli_bench import bench
from .cli_join import add_join_commands

if TYPE_CHECKING:
    from .cli_client import Endpoint
    from .settings import ClientSettings

_EXIT_FAILED: Final = 1
_EXIT_USAGE: Final = 2
_DEMO: Final = "demo"
_STOP_TIMEOUT_S: Final = 60.0
_STOP_POLL_S: Final = 0.05


class _Commands(TyperGroup):
    """The CLI's one edge: an error of the tree becomes a line on stderr and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except ExoNodeError as error:
            _note(f"exo-node: {error.message}")
            raise typer.Exit(_exit_code(error)) from error


def _exit_code(error: ExoNodeError) -> int:
    from .cli_client import CallFailed

    match error:
        case CallFailed():
            return error.exit_code
        case InvalidSettings():
            return _EXIT_USAGE
        case _:
            return _EXIT_FAILED


app = typer.Typer(
    cls=_Commands,
    help="Run large models on the Macs and Linux machines that you own.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(bench, name="bench")
add_join_commands(app)


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


_VARIABLES: Final = (
    "By variable only: EXO_API_KEY (clients must show it), EXO_CLUSTER_KEY, "
    "EXO_NATIVE_MTP_ENABLED=0 (no multi-token prediction), EXO_NATIVE_MTP_ADAPTIVE=0 (always the "
    "card's K), EXO_NATIVE_MTP_STRICT=1 (the same rows in every step, see `exo-node verify`), "
    "EXO_NATIVE_MTP_ASYNC_DRAFT_EVAL=0."
)

DataDir = Annotated[
    str | None,
    typer.Option(metavar="DIR", help="The node's data folder. [EXO_DATA_DIR]"),
]
LocalPort = Annotated[
    str | None,
    typer.Option(
        metavar="PORT",
        help="The node's HTTP port; default: that of the node on the data folder. [EXO_PORT]",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command(epilog=_VARIABLES)
def start(
    name: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="What peers call this node; default: host name. [EXO_NAME]"
        ),
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="HTTP address; other than loopback needs EXO_API_KEY. Default: 127.0.0.1. "
            "[EXO_HOST]",
        ),
    ] = None,
    port: Annotated[
        str | None, typer.Option(metavar="PORT", help="HTTP port; default: 52415. [EXO_PORT]")
    ] = None,
    grpc_port: Annotated[
        str | None,
        typer.Option(metavar="PORT", help="Node-to-node port; default: 52416. [EXO_GRPC_PORT]"),
    ] = None,
    interface: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Talk to peers on this address only; default: all private ones. [EXO_INTERFACE]",
        ),
    ] = None,
    data_dir: DataDir = None,
    models_dir: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="A folder of model folders, besides the Hugging Face cache. [EXO_MODELS_DIR]",
        ),
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST:PORT",
            help="A peer to dial where multicast does not reach; repeatable. "
            "[EXO_PEER, comma separated]",
        ),
    ] = None,
    cluster_key_file: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="The cluster's key; EXO_CLUSTER_KEY may hold the key itself. "
            "[EXO_CLUSTER_KEY_FILE]",
        ),
    ] = None,
    open_name: Annotated[
        str | None,
        typer.Option(
            "--open",
            metavar="NAME",
            help="For labs: nodes that give the same name join each other without approval. "
            "[EXO_OPEN]",
        ),
    ] = None,
    no_mdns: Annotated[
        bool, typer.Option("--no-mdns", help="Neither announce nor look for peers. [EXO_MDNS=0]")
    ] = False,
    memory_limit: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Memory for models, such as 12GB or 12GiB; default: 75 % of a Mac's memory, "
            "80 % of what is free elsewhere. [EXO_MEMORY_LIMIT]",
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="DTYPE",
            help="auto, float32, bfloat16 or float16; default: auto. [EXO_DTYPE]",
        ),
    ] = None,
    offline: Annotated[
        bool, typer.Option("--offline", help="Talk to nobody but peers. [EXO_OFFLINE=1]")
    ] = False,
    log_format: Annotated[
        str | None,
        typer.Option(
            metavar="FORMAT",
            help="human or json; default: human on a terminal, else json. [EXO_LOG_FORMAT]",
        ),
    ] = None,
) -> None:
    """Run a node here, in the foreground.

    It ends on Ctrl-C, SIGTERM or `exo-node stop`. A flag wins over its [VARIABLE].
    """
    flags = {
        "name": name,
        "host": host,
        "port": port,
        "grpc_port": grpc_port,
        "interface": interface,
        "data_dir": data_dir,
        "models_dir": models_dir,
        "peers": peer or None,
        "cluster_key_file": cluster_key_file,
        "open": open_name,
        "mdns": False if no_mdns else None,
        "memory_limit": memory_limit,
        "dtype": dtype,
        "offline": offline or None,
        "log_format": log_format,
    }
    raise typer.Exit(_start(flags))


def _start(flags: Mapping[str, object]) -> int:
    from . import settings

    environ = settings.environment()
    wanted = settings.load_settings(flags, environ)
    settings.quieten_grpc()
    settings.check_mlx_extras(settings.installed_distributions())
    from .run import run_node

    return run_node(wanted, settings.unknown_variables(environ))


@app.command()
def chat(
    prompt: Annotated[
        str, typer.Argument(metavar="PROMPT", help="What to ask; - reads it from stdin.")
    ],
    model: Annotated[
        str | None,
        typer.Option(
            metavar="ID", help="A model's id; default: the loaded one, else the small demo."
        ),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Stop after that many.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0, metavar="T", help="0 is greedy; default: the model's.")
    ] = None,
    num_draft_tokens: Annotated[
        int | None,
        typer.Option(min=0, metavar="K", help="Drafts a round; 0 is off; default: the model's."),
    ] = None,
    port: LocalPort = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Ask the node one question.

    The answer streams to stdout; its numbers follow on stderr.
    """
    from . import cli_client, cli_output

    text = sys.stdin.read() if prompt == "-" else prompt
    if not text.strip():
        raise typer.BadParameter("the prompt is empty", param_hint="PROMPT")
    endpoint = cli_client.locate(_client_settings(port, data_dir))
    body: dict[str, Any] = {
        "model": model or _pick_model(endpoint),
        "messages": [{"role": "user", "content": text}],
    }
    options = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "num_draft_tokens": num_draft_tokens,
    }
    body |= {key: value for key, value in options.items() if value is not None}
    path = "/v1/chat/completions"
    if as_json:
        _print_json(cli_client.call(endpoint, path, body, timeout_s=None))
        return
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    stats = cli_output.print_answer(cli_client.stream(endpoint, path, body))
    if stats:
        _note(cli_output.stats_line(stats))


@app.command()
def status(port: LocalPort = None, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Show the node, its cluster and where models run."""
    from . import cli_client

    endpoint = cli_client.locate(_client_settings(port, data_dir))
    cluster = cli_client.call(endpoint, "/v1/cluster")
    placements = cli_client.call(endpoint, "/v1/placements").get("data", [])
    if as_json:
        _print_json({"cluster": cluster, "placements": placements})
        return
    from . import cli_output

    print(cli_output.status(cluster, placements))


@app.command()
def models(port: LocalPort = None, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """List the models that this node can run."""
    from . import cli_client

    endpoint = cli_client.locate(_client_settings(port, data_dir))
    listed = cli_client.call(endpoint, "/v1/models")
    if as_json:
        _print_json(listed)
        return
    from . import cli_output

    print(cli_output.models(listed.get("data", [])))


@app.command()
def events(
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with what happens, until Ctrl-C.")
    ] = False,
    limit: Annotated[
        int, typer.Option(min=0, max=1000, metavar="N", help="The latest N of those before.")
    ] = 100,
    own: Annotated[
        bool, typer.Option("--node", help="What this node saw itself, not what the head did.")
    ] = False,
    port: LocalPort = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Show what happened in the cluster, one line each."""
    from . import cli_client, cli_events

    endpoint = cli_client.locate(_client_settings(port, data_dir))
    cli_events.print_events(endpoint, follows=follow, limit=limit, own=own, as_json=as_json)


@app.command()
def verify(
    model: Annotated[
        str, typer.Argument(metavar="[MODEL]", help="A model's id, or a checkpoint's folder.")
    ] = _DEMO,
    k: Annotated[
        int | None,
        typer.Option("--k", min=1, metavar="K", help="Most drafts a round; default: the card's."),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(metavar="DTYPE", help="auto, float32, bfloat16 or float16. [EXO_DTYPE]"),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer prompts, tokens and samples.")
    ] = False,
    json_file: Annotated[
        str | None,
        typer.Option(
            "--json", metavar="FILE", help="Write the report to send to us; - prints it instead."
        ),
    ] = None,
    models_dir: Annotated[
        str | None, typer.Option(metavar="DIR", help="A folder of model folders. [EXO_MODELS_DIR]")
    ] = None,
) -> None:
    """Check that drafts change no answer of a model on this machine.

    Exit status 1 where they do by more than rounding explains. No node has to run.
    """
    from .cli_verify import run_verify

    raise typer.Exit(
        run_verify(model, k=k, dtype=dtype, quick=quick, json_file=json_file, models_dir=models_dir)
    )


@app.command()
def plan(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model's id.")],
    min_nodes: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Over so many nodes at least.")
    ] = None,
    max_nodes: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Over so many nodes at most.")
    ] = None,
    context: Annotated[
        int | None, typer.Option(min=1, metavar="TOKENS", help="Room for a context of so many.")
    ] = None,
    nodes: Annotated[
        str | None, typer.Option(metavar="A,B", help="Just these nodes, in whatever order.")
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option(metavar="A:8,B:8", help="This split: layers of each, the generator first."),
    ] = None,
    exclude: Annotated[str | None, typer.Option(metavar="A,B", help="Not these nodes.")] = None,
    port: LocalPort = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Show where a model would be placed, what comes next and why; nothing is loaded."""
    from . import cli_client, cli_plan

    options = {
        "min_nodes": min_nodes,
        "max_nodes": max_nodes,
        "context": context,
        "nodes": nodes,
        "layers": layers,
        "exclude": exclude,
    }
    endpoint = cli_client.locate(_client_settings(port, data_dir))
    preview = cli_client.call(endpoint, cli_plan.query(model, options))
    if as_json:
        _print_json(preview)
        return
    print(cli_plan.told(preview))


@app.command()
def stop(data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """End the node on the data folder, and wait for its end."""
    from .cli_client import no_node
    from .presence import find_running

    folder = _client_settings(None, data_dir).data_dir
    running = find_running(folder)
    if running is None:
        raise no_node(f"no node runs with the data folder {folder}")
    _end(running.pid, folder)
    if as_json:
        _print_json({"stopped": True, "pid": running.pid})
    else:
        _note(f"stopped the node with pid {running.pid}")


def _end(pid: int, folder: Path) -> None:
    import os
    import signal
    import time

    from .presence import find_running

    try:
        os.kill(pid, signal.SIGTERM)
    except ProcessLookupError:
        return
    except PermissionError as error:
        raise ExoNodeError(f"pid {pid} belongs to another user; stop it as that user") from error
    deadline = time.monotonic() + _STOP_TIMEOUT_S
    while (holder := find_running(folder)) is not None and holder.pid == pid:
        if time.monotonic() > deadline:
            raise ExoNodeError(
                f"the node (pid {pid}) still runs {_STOP_TIMEOUT_S:g} s after it was asked to end; "
                f"`kill -9 {pid}` ends it without care for its requests"
            )
        time.sleep(_STOP_POLL_S)


def _client_settings(port: str | None, data_dir: str | None) -> "ClientSettings":
    from .settings import environment, load_client_settings

    return load_client_settings({"port": port, "data_dir": data_dir}, environment())


def _pick_model(endpoint: "Endpoint") -> str:
    from .cli_client import call

    for entry in call(endpoint, "/v1/models").get("data", []):
        if entry.get("loaded"):
            return str(entry["id"])
    _note(
        f"no model is loaded: using the small {_DEMO} model; for a real one try "
        "`exo-node chat --model Qwen/Qwen3.6-27B …`"
    )
    return _DEMO


def _print_json(value: Mapping[str, Any]) -> None:
    print(json.dumps(value, indent=2))


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
