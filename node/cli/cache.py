"""`exo-node cache`: the prompts that runners keep on disk; no node has to run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from ...placement.errors import InvalidRequest
from ..store.prefix_folder import StoredPrefix, prefix_root, remove_prefixes, stored_prefixes
from .client import client_settings
from .flags import AsJson, DataDir, argument, group
from .output import minute, note, print_json, print_result, print_table, size

cache = group("Show and clear the prompts that models keep on disk.")

_UNREADABLE = "(unreadable)"
_Model = Annotated[str, argument("MODEL", "As `exo-node cache list` shows it.")]
_MaybeModel = Annotated[str | None, argument("[MODEL]", "Only this model's; default: all.")]


@cache.command("list")
def list_models(data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """List the models with prompts on disk, with their last use."""
    by_model = dict[str | None, list[StoredPrefix]]()
    for each in stored_prefixes(_root(data_dir)):
        by_model.setdefault(each.model, []).append(each)
    models = [_model(model, files) for model, files in by_model.items()]
    if as_json:
        print_json({"data": models})
    elif not models:
        note("no prompts are on disk")
    else:
        header = ("MODEL", "FILES", "ROWS", "LONGEST", "SIZE", "LAST USED")
        rows = [
            (
                each["model"] or _UNREADABLE,
                str(each["files"]),
                str(each["rows"]),
                str(each["longest_rows"]),
                size(each["bytes"]),
                each["last_used"],
            )
            for each in models
        ]
        print_table(header, rows)


@cache.command()
def show(model: _Model, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Show the files of one model, the most recently used first."""
    files = [each for each in stored_prefixes(_root(data_dir)) if each.model == model]
    if not files:
        raise _no_prompts(model)
    entries = [_file(each) for each in files]
    if as_json:
        print_json({"data": entries})
        return
    rows = [
        (f"{each['begin']}-{each['rows']}", size(each["bytes"]), each["last_used"], each["file"])
        for each in entries
    ]
    print_table(("ROWS", "SIZE", "LAST USED", "FILE"), rows)


@cache.command()
def clear(model: _MaybeModel = None, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Delete the prompts on disk. A running node then reads them once more."""
    count, removed_bytes = remove_prefixes(_root(data_dir), model)
    if model is not None and not count:
        raise _no_prompts(model)
    text = f"removed {count} file{'' if count == 1 else 's'}, {size(removed_bytes)}"
    print_result({"removed": count, "bytes": removed_bytes}, text, as_json=as_json)


def _root(data_dir: str | None) -> Path:
    return prefix_root(client_settings(None, data_dir).data_dir)


def _no_prompts(model: str) -> InvalidRequest:
    return InvalidRequest(
        f"no prompts of {model!r} are on disk; see `exo-node cache list`", param="MODEL"
    )


def _model(model: str | None, files: Sequence[StoredPrefix]) -> dict[str, Any]:
    return {
        "model": model,
        "files": len(files),
        "rows": sum(each.rows - each.begin for each in files),
        "longest_rows": max(each.rows for each in files),
        "bytes": sum(each.bytes for each in files),
        "last_used": minute(max(each.used_ns for each in files) // 10**9),
    }


def _file(each: StoredPrefix) -> dict[str, Any]:
    return {
        "file": "/".join(each.path.parts[-2:]),
        "begin": each.begin,
        "rows": each.rows,
        "bytes": each.bytes,
        "last_used": minute(each.used_ns // 10**9),
    }
