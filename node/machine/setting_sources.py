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

from ...placement.errors import InvalidSettings


@dataclass(frozen=True, slots=True)
class SettingSource:
    """The variable and the flag of a setting; secrets have no flag, which `ps` would show."""

    variable: str
    flag: str | None = None


_FLAGS: Final = (
    *("name", "host", "port", "grpc_port", "interface", "data_dir", "cluster_key_file"),
    *("memory_limit", "dtype", "offline", "auto_download", "log_format", "log_file"),
)
_OTHERS: Final[Mapping[str, SettingSource]] = {
    "models_dirs": SettingSource("EXO_MODELS_DIR", "--models-dir"),
    "peers": SettingSource("EXO_PEER", "--peer"),
    "mdns": SettingSource("EXO_MDNS", "--no-mdns"),
}


def source_of(field: str) -> SettingSource:
    """The source of a field of `Settings`, whose name is that of its variable, and of a flag."""
    flag = f"--{field.replace('_', '-')}" if field in _FLAGS else None
    return _OTHERS.get(field) or SettingSource(f"EXO_{field.upper()}", flag)


@dataclass(frozen=True, slots=True)
class Inputs:
    """The values from flags and variables by field, and for each its flag or variable."""

    values: dict[str, Any]
    origins: dict[str, str]


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


def take_environment_file(path: Path) -> None:
    """Adds the variables of a file to this process's environment, where they are not set already.

    Lines are NAME=VALUE, as in the EnvironmentFile of systemd.exec(5): quotes may stand around a
    value, and # or ; begins a comment. A missing file has no variables. Raises InvalidSettings.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except FileNotFoundError:
        return
    except (OSError, UnicodeDecodeError) as fault:
        raise InvalidSettings(f"{path}: {fault}", param="--environment-file") from None
    for number, line in enumerate(map(str.strip, lines), 1):
        if not line or line[0] in "#;":
            continue
        name, equals, value = line.partition("=")
        if not equals or not name.strip().isidentifier() or "\0" in value:
            text = f"{path}, line {number}: no NAME=VALUE; mend the line or begin it with #"
            raise InvalidSettings(text, param="--environment-file")
        value = value.strip()
        if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'":
            value = value[1:-1]
        _ = os.environ.setdefault(name.strip(), value)


def default_data_dir() -> Path:
    return platformdirs.user_data_path("exo-node", appauthor=False)


def collect(
    fields: Iterable[str], flags: Mapping[str, object], environ: Mapping[str, str]
) -> Inputs:
    """The inputs of these settings; a flag that is None is not used."""
    fields = list(fields)
    if stray := flags.keys() - {field for field in fields if source_of(field).flag}:
        raise TypeError(f"no flag: {', '.join(sorted(stray))}")
    inputs = Inputs({}, {})
    for field in fields:
        source, flag = source_of(field), flags.get(field)
        if source.flag and flag is not None:
            inputs.values[field], inputs.origins[field] = flag, source.flag
        elif text := environ.get(source.variable, "").strip():
            inputs.values[field], inputs.origins[field] = text, source.variable
    return inputs
