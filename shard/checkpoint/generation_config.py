"""A publisher's suggestions in generation_config.json: sampling, and the tokens that end answers.

The file is optional: each value that is none of its field is left out and named.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, cast

from ...placement.config import MAX_VOCAB
from ...placement.sampling_values import API_DEFAULTS, usable_value
from .headers import name_in_model, optional_object, quote

FILE: Final = "generation_config.json"


@dataclass(frozen=True, slots=True)
class GenerationConfig:
    """The usable values. `notes`: what was left out, as sentences for a person."""

    sampling: Mapping[str, float] = field(default_factory=dict[str, float])
    """Values by a request's fields; `do_sample` false is the temperature 0."""
    ends: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()


def read_generation_config(folder: Path) -> GenerationConfig:
    """The file's values; none of them where there is no readable file."""
    notes: list[str] = []
    path = folder / FILE
    config = optional_object(path, notes)
    at = name_in_model(path)
    sampling: dict[str, float] = {}
    for name in API_DEFAULTS:
        if name not in config:
            continue
        value = usable_value(name, config[name])
        if value is None:
            notes.append(f"ignored: {at} has {name} = {quote(config[name])}")
        else:
            sampling[name] = value
    samples = config.get("do_sample", True)
    if not isinstance(samples, bool):
        notes.append(f"ignored: {at} has do_sample = {quote(samples)}")
    elif not samples:  # its filters are not meant for a request that samples
        penalty = {name: x for name, x in sampling.items() if name == "repetition_penalty"}
        sampling = {"temperature": 0.0, **penalty}
    ends, others = _end_tokens(config.get("eos_token_id"))
    if others:
        notes.append(f"ignored: {at} has {quote(others)} in eos_token_id, which are no tokens' ids")
    return GenerationConfig(sampling, tuple(ends), tuple(notes))


def _end_tokens(value: object) -> tuple[list[int], list[object]]:
    """The ids in a value or a list, and the values there that are none."""
    if value is None:
        return [], []
    values = cast("list[object]", value) if isinstance(value, list) else [value]
    ids, others = list[int](), list[object]()
    for each in values:
        if type(each) is int and 0 <= each < MAX_VOCAB:
            ids.append(each)
        else:
            others.append(each)
    return ids, others
