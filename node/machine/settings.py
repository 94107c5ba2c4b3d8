"""Every setting of a node, from flags and `EXO_*` variables.

A flag wins over its variable, a variable over the default; an empty variable counts as unset.
"""

import math
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Final, Literal

import platformdirs
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, ValidationError

from ...placement.errors import InvalidSettings
from . import setting_values as values
from .awake import KeepAwake
from .setting_sources import Inputs, collect, default_data_dir, source_of
from .setting_sources import environment as environment
from .setting_sources import forget_variables_of_libraries as forget_variables_of_libraries
from .setting_sources import take_environment_file as take_environment_file
from .timing import Profile

LOAD_TIMEOUT_S: Final = 300
"""EXO_LOAD_TIMEOUT's default: enough for the longest step of a small model on a slow machine."""


Dtype = Literal["auto", "float32", "bfloat16", "float16"]
LogFormat = Literal["human", "json"]
Kernels = Literal["auto", "mlx"]
Readers = Literal["0", "copies", "1", "any"]

DEFAULT_PORT: Final = 52415
DEFAULT_GRPC_PORT: Final = 52416


def _default_log_format() -> LogFormat:
    return "human" if sys.stderr.isatty() else "json"


def _default_name() -> str:
    """The machine's host name, by which people know it already."""
    name = os.uname().nodename.removesuffix(".local").strip()
    return name.encode()[: values.MAX_NAME_BYTES].decode(errors="ignore") or "node"


def _in_configuration(name: str) -> Path:
    return platformdirs.user_config_path("exo-node", appauthor=False) / name


Port = Annotated[int, BeforeValidator(values.as_port)]
Host = Annotated[str, BeforeValidator(values.as_host)]
DataDir = Annotated[Path, BeforeValidator(values.as_path)]
Secret = Annotated[SecretStr, BeforeValidator(values.as_secret)]
Switch = Annotated[bool, BeforeValidator(values.as_switch)]


class Settings(BaseModel):
    """The settings of `exo-node start`; docs/settings.md says what each means.

    Sizes are in bytes, times in seconds. A port of 0 takes a free one. A `native_mtp_*` switch and
    a `keep_awake` that are None may be changed at run time; a variable fixes them. None takes each
    card's `kv_bits`, and the share that `hardware` allows as `memory_limit`; a
    `native_mtp_default_k` of 0 takes each card's own.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    name: Annotated[str, BeforeValidator(values.as_name)] = Field(default_factory=_default_name)
    host: Host = "127.0.0.1"
    port: Port = DEFAULT_PORT
    grpc_port: Port = DEFAULT_GRPC_PORT
    interface: Annotated[str, BeforeValidator(values.as_interface)] | None = None
    data_dir: DataDir = Field(default_factory=default_data_dir)
    cards_dir: DataDir = Field(default_factory=partial(_in_configuration, "cards"))
    profiles_file: DataDir = Field(default_factory=partial(_in_configuration, "profiles.toml"))
    keep_alive: Annotated[float, BeforeValidator(values.duration_s)] = math.inf
    models_dirs: Annotated[tuple[Path, ...], BeforeValidator(values.as_folders)] = ()
    peers: Annotated[tuple[str, ...], BeforeValidator(values.as_peers)] = ()
    cluster_key_file: Annotated[Path, BeforeValidator(values.as_file)] | None = None
    cluster_key: Secret | None = None
    mdns: Switch = True
    memory_limit: Annotated[int, BeforeValidator(values.as_memory)] | None = None
    dtype: Annotated[Dtype, BeforeValidator(values.as_choice(Dtype))] = "auto"
    offline: Switch = False
    auto_download: Switch = False
    log_format: Annotated[LogFormat, BeforeValidator(values.as_choice(LogFormat))] = Field(
        default_factory=_default_log_format
    )
    api_key: Secret | None = None
    allowed_hosts: Annotated[tuple[str, ...], BeforeValidator(values.as_host_names)] = ()
    allowed_origins: Annotated[tuple[str, ...], BeforeValidator(values.as_origins)] = ()
    native_mtp_enabled: Switch | None = None
    native_mtp_async_draft_eval: Switch | None = None
    native_mtp_adaptive: Switch | None = None
    native_mtp_default_k: Annotated[int, BeforeValidator(values.as_draft_tokens)] = 0
    load_timeout: Annotated[int, BeforeValidator(values.as_seconds)] = LOAD_TIMEOUT_S
    kernels: Annotated[Kernels, BeforeValidator(values.as_choice(Kernels))] = "auto"
    timing: Annotated[Profile, BeforeValidator(values.as_choice(Profile))] = "lan"
    prefix_cache_enabled: Switch = True
    prefix_disk_gb: Annotated[float, BeforeValidator(values.as_gigabytes)] | None = None
    batching_enabled: Switch = True
    prompt_lookup_enabled: Switch = True
    readers: Annotated[Readers, BeforeValidator(values.as_choice(Readers))] = "copies"
    measure_at_load: Switch = False
    loop_guard: Switch = True
    kv_bits: Annotated[int, BeforeValidator(values.as_kv_bits)] | None = None
    log_file: Annotated[Path, BeforeValidator(values.as_path)] | None = None
    keep_awake: Annotated[KeepAwake, BeforeValidator(values.as_choice(KeepAwake))] | None = None


_STRICT: Final = "EXO_NATIVE_MTP_STRICT"
_STRICT_REFUSAL: Final = (
    f"{_STRICT}: there is no strict mode any more: rows of products are computed in groups that "
    "were measured to agree, and copied drafts only where a verify is exact; unset it. `exo-node "
    "verify` shows what is exact on this machine, and EXO_NATIVE_MTP_ENABLED=0 decodes without "
    "drafts of a head"
)
SOURCES: Final = {name: source_of(name) for name in Settings.model_fields}


def models_folders(settings: Settings) -> tuple[Path, ...]:
    """The folders of models besides the Hugging Face cache; the first that has a model counts.

    The last is exo-node's own, which need not exist.
    """
    return (*settings.models_dirs, settings.data_dir / "models")


def visible_gpus() -> str | None:
    """The GPUs that CUDA shows to this process and its runners, in order, or None for all."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def sudo_user() -> str:
    """The user who called sudo, empty without it."""
    return os.environ.get("SUDO_USER", "")


def load_settings(
    flags: Mapping[str, object],
    environ: Mapping[str, str],
    has_token: Callable[[Path], bool] = lambda _data_dir: False,
) -> Settings:
    """The node's settings; `flags` is keyed by field name, None where the flag is not used.

    `has_token`: whether a data folder has an API token, which is a key as EXO_API_KEY is.

    Raises InvalidSettings, whose `param` is the flag or variable that supplied the bad value.
    """
    if environ.get(_STRICT, "").strip():
        raise InvalidSettings(_STRICT_REFUSAL, param=_STRICT)
    inputs = collect(Settings.model_fields, flags, environ)
    if flags.get("cluster_key_file") is not None:
        inputs.values.pop("cluster_key", None)
    settings = _validate(inputs)
    _check_bind(settings, inputs, has_token)
    _check_ports(settings, inputs)
    if settings.cluster_key is not None and settings.cluster_key_file is not None:
        raise InvalidSettings(
            "EXO_CLUSTER_KEY and EXO_CLUSTER_KEY_FILE are both set; unset one of them",
            param="EXO_CLUSTER_KEY",
        )
    return settings


def unknown_variables(environ: Mapping[str, str], forgotten: Iterable[str] = ()) -> tuple[str, ...]:
    """A sentence for each `EXO_*` variable that no setting reads (its value is not shown), and for
    those of libraries that were forgotten."""
    from difflib import get_close_matches

    variables = [source.variable for source in SOURCES.values()]
    sentences = [f"{name} has no effect on exo-node" for name in forgotten]
    for variable in sorted(environ):
        if variable.startswith("EXO_") and variable not in variables:
            near = get_close_matches(variable, variables, n=1, cutoff=0.75)
            hint = f"; did you mean {near[0]}?" if near else ""
            sentences.append(f"{variable} is no setting of exo-node and has no effect{hint}")
    return tuple(sentences)


def installed_distributions() -> frozenset[str]:
    """The normalised names of every installed distribution (nothing is imported).

    They come from the folders `name-version.dist-info`: importlib.metadata parses a file of each,
    which for a hundred distributions takes a tenth of a node's start.
    """
    paths = (path for folder in sys.path for path in Path(folder).glob("*.dist-info"))
    names = (path.name.partition("-")[0] for path in paths)
    return frozenset(re.sub(r"[-_.]+", "-", name).lower() for name in names)


def check_mlx_extras(distributions: Collection[str], platform: str = sys.platform) -> None:
    """Raise InvalidSettings unless Linux has exactly one MLX backend.

    On Linux `mlx` alone has no libmlx.so: mlx-cpu and each mlx-cuda-* bring one, at the same
    path, so that two of them overwrite (and on removal delete) each other's.
    """
    if platform != "linux":
        return
    backends = sorted(n for n in distributions if n == "mlx-cpu" or n.startswith("mlx-cuda"))
    install = "`pip install 'exo-node[cpu]'` or `pip install 'exo-node[cuda]'`"
    if not backends:
        raise InvalidSettings(f"MLX has no backend here; run {install}", param="mlx")
    if len(backends) > 1:
        raise InvalidSettings(
            f"{' and '.join(backends)} are both installed and overwrite each other; "
            f"run `pip uninstall {' '.join(backends)}`, then {install}",
            param="mlx",
        )


def _validate(inputs: Inputs) -> Settings:
    try:
        return Settings.model_validate(inputs.values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        origin = inputs.origins[str(first["loc"][0])]
        problem = first.get("ctx", {}).get("error", first["msg"])
        # `from None`: pydantic's own text repeats the input, which may be a key.
        raise InvalidSettings(f"{origin}: {problem}", param=origin) from None


def _check_bind(settings: Settings, inputs: Inputs, has_token: Callable[[Path], bool]) -> None:
    if values.is_loopback(settings.host) or settings.api_key is not None:
        return
    if has_token(settings.data_dir):
        return
    origin = inputs.origins["host"]
    raise InvalidSettings(
        f"{origin}: {settings.host} lets other machines use this node without a key; "
        "set EXO_API_KEY, make a key with `exo-node token create NAME`, or keep 127.0.0.1",
        param=origin,
    )


def _check_ports(settings: Settings, inputs: Inputs) -> None:
    if settings.port != settings.grpc_port or settings.port == 0:
        return
    origin = inputs.origins.get("grpc_port") or inputs.origins["port"]
    raise InvalidSettings(
        f"{origin}: {settings.port} is both the HTTP and the node-to-node port; "
        "give --port and --grpc-port different numbers",
        param=origin,
    )


_RUNNER_VARIABLES: Final = (
    *("PATH", "HOME", "TMPDIR", "XDG_CACHE_HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH"),
    *("PYTHONPATH", "CUDA_HOME", "CUDA_VISIBLE_DEVICES"),
)


def runner_environment(environ: Mapping[str, str]) -> Mapping[str, str]:
    """The environment of a runner: enough to run, nothing that could change an answer.

    Its libraries must not contact a hub, whatever a checkpoint's files name, nor log that PyTorch
    is missing or what they think of a model.
    """
    inherited = {name: environ[name] for name in _RUNNER_VARIABLES if name in environ}
    offline = {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
        # What they say of a model would be taken for the last words of a runner that ends.
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_VERBOSITY": "error",
    }
    # From the M5 on MLX multiplies float32 in TF32: other bits than those of an earlier Mac.
    exact = {"MLX_ENABLE_TF32": "0"} if sys.platform == "darwin" else {}
    return {**inherited, **offline, **exact}
