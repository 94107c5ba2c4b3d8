"""`exo-node start` and `exo-node stop`."""

import gc
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final

import typer

from ...placement.errors import ExoNodeError
from ..machine.data_dir_lock import Running, find_running
from .client import ApiEndpoint, call, client_settings, no_node
from .failures import CommandFailed
from .flags import AsJson, DataDir, Dtype, ModelsDir, option, switch
from .output import note, print_result
from .times import TIMES

VARIABLES: Final = (
    "By variable only, as docs/settings.md says: EXO_API_KEY, EXO_ALLOWED_HOSTS, "
    "EXO_ALLOWED_ORIGINS, EXO_CLUSTER_KEY, EXO_NATIVE_MTP_ENABLED, EXO_NATIVE_MTP_ADAPTIVE, "
    "EXO_NATIVE_MTP_DEFAULT_K, EXO_NATIVE_MTP_ASYNC_DRAFT_EVAL, EXO_PREFIX_CACHE_ENABLED, "
    "EXO_PREFIX_DISK_GB, EXO_BATCHING_ENABLED, EXO_PROMPT_LOOKUP_ENABLED, EXO_READERS, "
    "EXO_LOOP_GUARD, EXO_KV_BITS, EXO_CARDS_DIR, EXO_PROFILES_FILE, "
    "EXO_KEEP_ALIVE, EXO_KEEP_AWAKE, EXO_LOAD_TIMEOUT, EXO_MEASURE_AT_LOAD, EXO_KERNELS, "
    "EXO_TIMING."
)

_Name = Annotated[
    str | None, option("NAME", "What peers call this node; default: host name. [EXO_NAME]")
]
_Host = Annotated[
    str | None,
    option(
        "ADDRESS",
        "HTTP address; other than loopback needs EXO_API_KEY or an `exo-node token`. "
        "Default: 127.0.0.1. [EXO_HOST]",
    ),
]
_Port = Annotated[str | None, option("PORT", "HTTP port; default: 52415. [EXO_PORT]")]
_GrpcPort = Annotated[
    str | None, option("PORT", "Node-to-node port; default: 52416. [EXO_GRPC_PORT]")
]
_Interface = Annotated[
    str | None,
    option(
        "ADDRESS", "Talk to peers on this address only; default: all private ones. [EXO_INTERFACE]"
    ),
]
_Peer = Annotated[
    list[str] | None,
    option(
        "HOST:PORT",
        "A peer to dial where multicast does not reach; repeatable. [EXO_PEER, comma separated]",
    ),
]
_ClusterKeyFile = Annotated[
    str | None,
    option(
        "FILE", "The cluster's key; EXO_CLUSTER_KEY may hold the key itself. [EXO_CLUSTER_KEY_FILE]"
    ),
]
_NoMdns = Annotated[bool, switch("Neither announce nor look for peers. [EXO_MDNS=0]", "--no-mdns")]
_MemoryLimit = Annotated[
    str | None,
    option(
        "SIZE",
        "Memory for models, such as 12GB; default: what Metal lets a process use on a Mac, "
        "80 % of what is free elsewhere. [EXO_MEMORY_LIMIT]",
    ),
]
_Offline = Annotated[bool, switch("Talk to nobody but peers. [EXO_OFFLINE=1]", "--offline")]
_AutoDownload = Annotated[
    bool,
    switch(
        "A request may download the model that it names. [EXO_AUTO_DOWNLOAD=1]", "--auto-download"
    ),
]
_LogFormat = Annotated[
    str | None,
    option("FORMAT", "human or json; default: human on a terminal, else json. [EXO_LOG_FORMAT]"),
]
_LogFile = Annotated[
    str | None, option("FILE", "Where to log, rotated at 10 MB; default: stderr. [EXO_LOG_FILE]")
]
_EnvironmentFile = Annotated[
    str | None, option("FILE", "Lines NAME=VALUE of variables that are not set.", hidden=True)
]


start = typer.Typer(add_completion=False, rich_markup_mode=None)


@start.command(epilog=VARIABLES)
def start_node(
    name: _Name = None,
    host: _Host = None,
    port: _Port = None,
    grpc_port: _GrpcPort = None,
    interface: _Interface = None,
    data_dir: DataDir = None,
    models_dir: ModelsDir = None,
    peer: _Peer = None,
    cluster_key_file: _ClusterKeyFile = None,
    no_mdns: _NoMdns = False,
    memory_limit: _MemoryLimit = None,
    dtype: Dtype = None,
    offline: _Offline = False,
    auto_download: _AutoDownload = False,
    log_format: _LogFormat = None,
    log_file: _LogFile = None,
    environment_file: _EnvironmentFile = None,
) -> None:
    """Run a node here, in the foreground.

    It ends on Ctrl-C, SIGTERM or `exo-node stop`. A flag wins over its [VARIABLE].
    """
    options = {flag: value for flag, value in locals().items() if value not in (None, False, [])}
    _ = options.pop("environment_file", None)
    flags = {
        "models_dirs": options.pop("models_dir", None),
        "peers": options.pop("peer", None),
        "mdns": False if options.pop("no_mdns", False) else None,
    }
    raise typer.Exit(_run(flags | options, environment_file))


def _run(flags: Mapping[str, object], environment_file: str | None) -> int:
    """The node's exit status; a flag that is None leaves its variable or default."""
    from ..machine import settings
    from ..trust.token_file import has_token

    if environment_file is not None:
        settings.take_environment_file(Path(environment_file))
    forgotten = settings.forget_variables_of_libraries()
    environ = settings.environment()
    loaded = settings.load_settings(flags, environ, has_token)
    settings.check_mlx_extras(settings.installed_distributions())
    gc.disable()  # nothing that an import creates is garbage
    from ..run import run_node

    gc.freeze()
    gc.enable()
    return run_node(loaded, settings.unknown_variables(environ, forgotten))


# ---------------------------------------------------------------------------- stop


def stop(data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """End the node on the data folder, and wait for its end."""
    folder = client_settings(None, data_dir).data_dir
    running = find_running(folder)
    if running is None:
        raise no_node(f"no node runs with the data folder {folder}")
    _end(running.pid, folder)
    text = f"stopped the node with pid {running.pid}"
    print_result({"stopped": True, "pid": running.pid}, text, as_json=as_json)


def _end(pid: int, folder: Path) -> None:
    """Signals the node and returns when it has ended, however long its answers take.

    Raises ExoNodeError where it neither ends nor answers.
    """
    try:
        os.kill(pid, signal.SIGTERM)
    except ProcessLookupError:
        return
    except PermissionError as error:
        raise ExoNodeError(f"pid {pid} belongs to another user; stop it as that user") from error
    alive_at = checked_at = time.monotonic()
    notified = False
    while (holder := find_running(folder)) is not None and holder.pid == pid:
        now = time.monotonic()
        if now - checked_at > TIMES.health_s:
            checked_at = now
            if _is_alive(holder):
                alive_at = now
                if not notified:
                    note(
                        f"the node (pid {pid}) ends its running answers; stop again to cut them "
                        "short"
                    )
                notified = True
        if now - alive_at > TIMES.stop_silence_s:
            raise ExoNodeError(
                f"the node (pid {pid}) still runs {TIMES.stop_silence_s:g} s after it was asked to "
                f"end, and does not answer; `kill -9 {pid}` ends it without care for its requests"
            )
        time.sleep(TIMES.poll_s)


def _is_alive(node: Running) -> bool:
    if node.http_host is None or node.http_port is None:
        return False
    try:
        endpoint = ApiEndpoint(node.http_host, node.http_port)
        _ = call(endpoint, "/health/live", timeout_s=TIMES.health_s)
    except CommandFailed:
        return False
    return True
