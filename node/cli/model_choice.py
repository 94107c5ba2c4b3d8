"""The model that a coding tool uses: chosen among the node's, checked for its context, loaded."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from ...placement.errors import InvalidSettings
from .client import ApiEndpoint, CallFailed, call
from .coding_tools import CodingTool
from .load import load as load_model
from .output import note
from .plan import preview_path
from .times import TIMES

_NAMED: Final = 8

Entry = Mapping[str, Any]
"""An entry of `GET /v1/models`."""


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """A model as a tool names it, and its context: as it is loaded, or as a load would place it.

    `base` is the model of a profile, else the model itself. `request` is the body that loads it, or
    None if it is loaded.
    """

    model: str
    base: str
    context: int
    request: Mapping[str, Any] | None = None


def choose(
    endpoint: ApiEndpoint, tool: CodingTool, model: str | None, context: int | None
) -> ModelChoice:
    """The named model, or else the loaded one, with room for what the tool needs. Loads nothing.

    Raises InvalidSettings with what is missing and models that would do, and CallFailed.
    """
    if context is not None and context < tool.least_context:
        least = f"{tool.title} needs {_tokens(tool.least_context)}"
        raise InvalidSettings(f"--context: {context} are too few; {least}", param="--context")
    # As the tool will call: with the key, and without the rights of the node's own user.
    as_the_tool = replace(endpoint, token=None)
    listed = call(as_the_tool, "/v1/models", timeout_s=TIMES.model_list_s).get("data", [])
    entries = [each for each in listed if not _can(each, "embeddings")]
    if model is not None and model in {each["id"] for each in listed if _can(each, "embeddings")}:
        raise InvalidSettings(f"{model} embeds and does not answer; name another", param="MODEL")
    entry = _entry(entries, tool, model)
    choice = _planned(endpoint, entry, context)
    if choice.context < tool.least_context:
        raise _too_small(tool, choice, entry, entries)
    if tool.calls and "capabilities" in entry and not _can(entry, "tools"):
        note(f"{choice.model} has no format for calling tools, by which {tool.title} works")
    return choice


def load(endpoint: ApiEndpoint, choice: ModelChoice) -> ModelChoice:
    """Loads the model unless it is loaded, and shows the progress. Raises CallFailed."""
    if choice.request is None:
        return choice
    note(f"loading {choice.base}, with {_tokens(choice.context)} of context")
    placement = load_model(endpoint, choice.request)
    return replace(choice, context=placement["context_length"], request=None)


def _entry(entries: Sequence[Entry], tool: CodingTool, model: str | None) -> Entry:
    """The entry of the model; of one that is on no disk its name alone."""
    if model is not None:
        return next((each for each in entries if each["id"] == model), {"id": model})
    loaded = [each for each in entries if each.get("loaded") and not each.get("profile_of")]
    if len(loaded) > 1:
        loaded = [each for each in loaded if _context(each) >= tool.least_context] or loaded
    if len(loaded) == 1:
        return loaded[0]
    what = "several models are loaded" if loaded else "no model is loaded"
    raise InvalidSettings(f"{what}; {_remedy(tool, loaded or entries)}", param="MODEL")


def _planned(endpoint: ApiEndpoint, entry: Entry, context: int | None) -> ModelChoice:
    name = str(entry["id"])
    if fault := entry.get("error"):
        raise CallFailed(f"{name} cannot be used: {fault}")
    base = str(entry.get("profile_of") or name)
    if entry.get("loaded") and _context(entry) >= (context or 0):
        return ModelChoice(name, base, _context(entry))
    options = {} if context is None else {"context": context}
    preview = call(endpoint, preview_path(base, options), timeout_s=TIMES.model_list_s)
    if refusal := preview.get("refusal"):
        raise CallFailed(str(refusal))
    return ModelChoice(name, base, preview["best"]["context_length"], {"model": base, **options})


def _too_small(
    tool: CodingTool, choice: ModelChoice, entry: Entry, entries: Sequence[Entry]
) -> InvalidSettings:
    """The error for a context that has no room for the tool's first request and an answer."""
    what = f"{choice.model} has {_tokens(choice.context)} of context, and {tool.title} needs "
    what += _tokens(tool.least_context)
    if choice.request is None and _fitting_context(entry) >= tool.least_context:
        remedy = f"`--context {tool.least_context}` loads it again with so many"
    else:
        remedy = _remedy(tool, entries)
    return InvalidSettings(f"{what}; {remedy}", param="MODEL")


def _remedy(tool: CodingTool, entries: Sequence[Entry]) -> str:
    """The models that would do, the loaded ones first."""
    enough = [each for each in entries if _serves(each, tool)]
    names = [str(each["id"]) for each in sorted(enough, key=lambda each: not each.get("loaded"))]
    if not names:
        tools = " and calls tools" if tool.calls else ""
        return (
            f"no model here has the {_tokens(tool.least_context)} of context that it needs{tools}: "
            "`exo-node models recommend` names models that fit this machine"
        )
    if len(names) > _NAMED + 1:  # "and 1 others" would be as long as a name
        names = [*names[:_NAMED], f"and {len(names) - _NAMED} others"]
    return f"`exo-node launch {tool.command} MODEL` names one: {', '.join(names)}"


def _serves(entry: Entry, tool: CodingTool) -> bool:
    """Whether a model has the context that the tool needs, and calls if it works by them."""
    calls = _can(entry, "tools") or "capabilities" not in entry
    return (
        not entry.get("error")
        and _context(entry) >= tool.least_context
        and (calls or not tool.calls)
    )


def _context(entry: Entry) -> int:
    """Tokens of context of a loaded model, or those that a load would give it now."""
    return int(entry.get("context_length") or 0) if entry.get("loaded") else _fitting_context(entry)


def _fitting_context(entry: Entry) -> int:
    """The context of a model; its own where only other nodes have it: none plans for it here."""
    fits: Entry = entry if entry.get("fits") is None else entry["fits"]
    return int(fits.get("context_length") or 0)


def _can(entry: Entry, capability: str) -> bool:
    return capability in (entry.get("capabilities") or ())


def _tokens(count: int) -> str:
    return f"{count:,} tokens"
