"""The settings by which a command finds its node, apart from the others: commands start at once."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ...placement.errors import InvalidSettings
from .setting_sources import collect, default_data_dir
from .setting_values import as_host, as_path, as_port, as_secret

_READERS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "host": as_host,
    "port": as_port,
    "data_dir": as_path,
    "api_key": as_secret,
}


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """How a command finds the running node; with `port` None by the run file."""

    host: str = "127.0.0.1"
    port: int | None = None
    data_dir: Path = field(default_factory=default_data_dir)
    api_key: str | None = field(default=None, repr=False)


def load_client_settings(flags: Mapping[str, object], environ: Mapping[str, str]) -> ClientSettings:
    """The settings of a command. `--data-dir` names a node, so it wins over EXO_PORT.

    Raises InvalidSettings.
    """
    inputs = collect(_READERS, flags, environ)
    if inputs.by_flag("data_dir") and not inputs.by_flag("port"):
        _ = inputs.values.pop("port", None)
    values: dict[str, Any] = {}
    for name, value in inputs.values.items():
        origin = inputs.origins[name]
        try:
            values[name] = _READERS[name](value)
        except ValueError as error:
            raise InvalidSettings(f"{origin}: {error}", param=origin) from None
    values["port"] = values.get("port") or None  # 0 names no port
    return ClientSettings(**values)
