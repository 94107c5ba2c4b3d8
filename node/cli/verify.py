"""`exo-node verify`: whether drafts can change answers on this machine, measured in a child."""

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ..placements.local_model import LocalModel

_CHILD: Final = "exo_node.shard.tools.verify.main"
STDOUT: Final = "-"


def run_verify(
    model: str,
    *,
    k: int | None,
    dtype: str | None,
    quick: bool,
    json_file: str | None,
    models_dir: list[str] | None,
) -> int:
    """The exit status: 0 where the contract holds, 1 where a defect is shown.

    Raises InvalidSettings, ModelNotFound and what else `resolve` raises.
    """
    import json

    from ..machine import settings
    from ..placements.local_model import resolve
    from .child import run_child

    environ = settings.environment()
    wanted = settings.load_settings({"dtype": dtype, "models_dirs": models_dir or None}, environ)
    distributions = settings.installed_distributions()
    settings.check_mlx_extras(distributions)
    found = resolve(model, wanted, distributions)
    request = {
        "stage": found.spec.SerializeToString().hex(),
        "k": _depth(k, found),
        "quick": quick,
        "json_file": _absolute(json_file),
        "chip": found.hardware.chip,
        "backend": found.hardware.backend,
        "memory_bytes": found.hardware.total_bytes,
        "quantization": found.card.quantization,
    }
    return run_child(_CHILD, json.dumps(request), settings.runner_environment(environ))


def _depth(k: int | None, found: "LocalModel") -> int:
    """0: as far as the card allows."""
    from ...placement.errors import InvalidSettings

    most = found.spec.max_draft_tokens
    if k is None or not most:
        return 0
    if k > most:
        raise InvalidSettings(
            f"--k: {k}, and {found.card.id} drafts at most {most} tokens a round; ask for less, or "
            "raise max_k in the exo-card.toml of its folder",
            param="--k",
        )
    return k


def _absolute(path: str | None) -> str:
    from pathlib import Path

    if path is None or path == STDOUT:
        return path or ""
    return str(Path(path).expanduser().absolute())
