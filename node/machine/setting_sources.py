"""The flag and the variable of each setting, and the inputs of a process from both.

A flag wins over its variable, a variable over the default; an empty variable counts as unset.
"""

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import platformdirs


@dataclass(frozen=True, slots=True)
class Source:
    """The variable and the flag of a setting; secrets have no flag, which `ps` would show."""

    variable: str
    flag: str | None = None


SOURCES: Final[Mapping[str, Source]] = {
    "name": Source("EXO_NAME", "--name"),
    "host": Source("EXO_HOST", "--host"),
    "port": Source("EXO_PORT", "--port"),
    "grpc_port": Source("EXO_GRPC_PORT", "--grpc-port"),
    "interface": Source("EXO_INTERFACE", "--interface"),
    "data_dir": Source("EXO_DATA_DIR", "--data-dir"),
    "cards_dir": Source("EXO_CARDS_DIR"),
    "profiles_file": Source("EXO_PROFILES_FILE"),
    "keep_alive": Source("EXO_KEEP_ALIVE"),
    "models_dirs": Source("EXO_MODELS_DIR", "--models-dir"),
    "peers": Source("EXO_PEER", "--peer"),
    "cluster_key_file": Source("EXO_CLUSTER_KEY_FILE", "--cluster-key-file"),
    "cluster_key": Source("EXO_CLUSTER_KEY"),
    "mdns": Source("EXO_MDNS", "--no-mdns"),
    "memory_limit": Source("EXO_MEMORY_LIMIT", "--memory-limit"),
    "dtype": Source("EXO_DTYPE", "--dtype"),
    "offline": Source("EXO_OFFLINE", "--offline"),
    "auto_download": Source("EXO_AUTO_DOWNLOAD", "--auto-download"),
    "image_urls": Source("EXO_IMAGE_URLS"),
    "log_format": Source("EXO_LOG_FORMAT", "--log-format"),
    "api_key": Source("EXO_API_KEY"),
    "allowed_hosts": Source("EXO_ALLOWED_HOSTS"),
    "allowed_origins": Source("EXO_ALLOWED_ORIGINS"),
    "native_mtp_enabled": Source("EXO_NATIVE_MTP_ENABLED"),
    "native_mtp_async_draft_eval": Source("EXO_NATIVE_MTP_ASYNC_DRAFT_EVAL"),
    "native_mtp_adaptive": Source("EXO_NATIVE_MTP_ADAPTIVE"),
    "native_mtp_default_k": Source("EXO_NATIVE_MTP_DEFAULT_K"),
    "native_mtp_strict": Source("EXO_NATIVE_MTP_STRICT"),
    "prefix_cache_enabled": Source("EXO_PREFIX_CACHE_ENABLED"),
    "prefix_disk_gb": Source("EXO_PREFIX_DISK_GB"),
    "batching_enabled": Source("EXO_BATCHING_ENABLED"),
    "prompt_lookup_enabled": Source("EXO_PROMPT_LOOKUP_ENABLED"),
    "loop_guard": Source("EXO_LOOP_GUARD"),
    "responses_gb": Source("EXO_RESPONSES_GB"),
    "responses_keep": Source("EXO_RESPONSES_KEEP"),
    "kv_bits": Source("EXO_KV_BITS"),
    "load_timeout": Source("EXO_LOAD_TIMEOUT"),
    "kernels": Source("EXO_KERNELS"),
    "timing": Source("EXO_TIMING"),
}

RENAMED: Final[Mapping[str, str]] = {
    "EXO_PREFIX_CACHE_DISK": "set EXO_PREFIX_DISK_GB to a number of GB instead, 0 for none",
}
"""Variables of earlier versions, each with what to do instead."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """The values from flags and variables by field, and for each its flag or variable."""

    values: dict[str, Any]
    origins: dict[str, str]

    def by_flag(self, field: str) -> bool:
        return self.origins.get(field, "").startswith("--")


_FORGOTTEN: list[str] = []
_OF_LIBRARIES: Final = re.compile(
    r"GRPC_(?!VERBOSITY$|TRACE$).*|PROMETHEUS_.*|prometheus_multiproc_dir|WEB_CONCURRENCY|"
    r"PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION|HF_HUB_(ETAG|DOWNLOAD)_TIMEOUT"
)
"""Variables that libraries read by themselves, and that could only break or slow exo-node: gRPC's
ciphers and experiments, another way to count, another number of processes, timeouts that the hub's
client cannot parse. Runners and their children inherit a short list of variables instead."""


def forget_variables_of_libraries() -> tuple[str, ...]:
    """Removes those variables from this process, before libraries read them; returns the names of
    all that were removed so far.

    The hub's client would let a hub ask which variables have which values, for its telemetry. Of
    gRPC's own log lines errors alone are left: it writes one for each handshake that fails, which a
    node of another cluster causes every second.
    """
    for name in sorted(filter(_OF_LIBRARIES.fullmatch, os.environ)):
        del os.environ[name]
        _FORGOTTEN.append(name)
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    _ = os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    return tuple(_FORGOTTEN)


def environment() -> Mapping[str, str]:
    """This process's environment, for the callers of the loaders."""
    return os.environ


def default_data_dir() -> Path:
    return platformdirs.user_data_path("exo-node", appauthor=False)


def collect(
    fields: Iterable[str], flags: Mapping[str, object], environ: Mapping[str, str]
) -> Inputs:
    """The inputs of these settings; a flag that is None is not used."""
    fields = list(fields)
    if stray := flags.keys() - {field for field in fields if SOURCES[field].flag}:
        raise TypeError(f"no flag: {', '.join(sorted(stray))}")
    inputs = Inputs({}, {})
    for field in fields:
        source = SOURCES[field]
        flag = flags.get(field)
        if source.flag and flag is not None:
            inputs.values[field], inputs.origins[field] = flag, source.flag
        elif text := environ.get(source.variable, "").strip():
            inputs.values[field], inputs.origins[field] = text, source.variable
    return inputs
