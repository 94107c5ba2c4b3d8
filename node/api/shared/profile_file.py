"""The user's names for models, with settings of their own, and requests to them.

The names are in `profiles.toml`, which is read after each change.

A bad profile becomes a fault with the file, the field and the remedy; the others stay in use. If
the file is not TOML, its previous content stays in use.
"""

import logging
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Final, cast

from pydantic import Field

from ....mtp.types import Sampling
from ....placement.errors import ExoNodeError, InvalidRequest, InvalidSettings, ModelNotFound
from ....placement.ids import ModelId
from ....proto import peer_pb2 as pb
from ....proto.fields import completed, filled
from ...chat.requests import GenerationRequest
from ...machine.background_reads import BackgroundRead, read_regular
from ..http.bodies import KeepAlive, validated
from .sampling_schema import SamplingBody
from .thinking_schema import Effort, TemplateKwargs, merge_options, thinking_options

_LOG: Final = logging.getLogger(__name__)
_FILE_LIMIT: Final = 1 << 20
_MAX_NAME: Final = 256
_REQUEST_FIELDS: Final = (
    "stream",
    "response_format",
    "grammar",
    "regex",
    "service_tier",
    "min_tokens",
    "ignore_eos",
)
"""Fields that belong to one request, not to the use of a model."""


class Profile(SamplingBody):
    """One name. Its values apply to the fields that a request does not set."""

    system: Annotated[str | None, Field(min_length=1, max_length=1 << 18)] = None
    """The system message of requests that do not begin with one."""
    reasoning_effort: Effort | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    keep_alive: KeepAlive = None

    @property
    def template_options(self) -> dict[str, Any]:
        return thinking_options(effort=self.reasoning_effort, kwargs=self.chat_template_kwargs)

    @classmethod
    def known_fields(cls) -> list[str]:
        return [name for name in cls.model_fields if name not in _REQUEST_FIELDS]

    def describe(self) -> dict[str, Any]:
        """The fields for a list of models, without the text of the system message."""
        fields = self.model_dump(exclude_none=True, exclude={"model", "system"}, mode="json")
        return fields | ({"system": True} if self.system else {})


@dataclass(frozen=True, slots=True)
class _Content:
    stamp: object = None
    profiles: Mapping[str, Profile] = field(default_factory=dict[str, Profile])
    faults: Mapping[str, ExoNodeError] = field(default_factory=dict[str, ExoNodeError])


class ProfileFile:
    """The profiles of one file as of the last `refresh`; the file need not exist."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._content = BackgroundRead(path, self._read)

    async def refresh(self) -> None:
        """Reads the file again if it has changed."""
        await self._content.refresh()

    def all(self) -> Mapping[str, Profile]:
        return self._content.value.profiles

    def faults(self) -> Mapping[str, ExoNodeError]:
        """The faults by the profile's name, or the file's."""
        return self._content.value.faults

    def listed(self) -> dict[str, dict[str, Any]]:
        """The fields of each profile in lists of models, or its fault."""
        own = {n: {"profile_of": p.model, "profile": p.describe()} for n, p in self.all().items()}
        return {**own, **{name: {"error": fault.message} for name, fault in self.faults().items()}}

    def get(self, name: str) -> Profile | None:
        """The profile of that name, or None. Raises its fault if it has one."""
        if (fault := self.faults().get(name)) is not None:
            raise fault
        return self.all().get(name)

    def _read(self, before: _Content | None) -> _Content:
        before, stamp = before or _Content(), _stamp(self._path)
        if stamp == before.stamp:
            return before
        profiles: dict[str, Profile] = {}
        faults: dict[str, ExoNodeError] = {}
        try:
            tables: Mapping[str, Any] = {} if stamp is None else _tables(self._path)
        except InvalidSettings as fault:
            content = _Content(stamp, before.profiles, {self._path.name: fault})
        else:
            for name, table in tables.items():
                try:
                    profiles[name] = _profile(self._path, name, table)
                except InvalidSettings as fault:
                    faults[name[:_MAX_NAME]] = fault
            content = _Content(stamp, profiles, faults)
        for fault in content.faults.values():
            _LOG.warning("%s", fault.message)
        return content


def _profile(path: Path, name: str, table: Any) -> Profile:
    where = f"{path}: {name[:_MAX_NAME]!r}"
    if not 0 < len(name) <= _MAX_NAME or not name.isprintable() or name != name.strip():
        raise InvalidSettings(
            f"{where} is no name; give 1 to {_MAX_NAME} printable characters", param=name[:80]
        )
    fields = {"model": table} if isinstance(table, str) else table
    if not isinstance(fields, dict):
        raise InvalidSettings(
            f"{where} is no profile; write [{name}] and model = 'OWNER/NAME' below it", param=name
        )
    table = cast(dict[str, Any], fields)
    misplaced = next((field for field in table if field in _REQUEST_FIELDS), None)
    if misplaced is not None:
        raise InvalidSettings(
            f"{where}: '{misplaced}' belongs to a request; remove it", param=misplaced
        )
    try:
        return validated(table, Profile)
    except InvalidRequest as fault:
        remedy = "mend that field or remove it"
        raise InvalidSettings(f"{where}: {fault.message}; {remedy}", param=fault.param) from None


def _tables(path: Path) -> Mapping[str, Any]:
    try:
        content, _ = read_regular(path, _FILE_LIMIT + 1)
    except OSError as fault:
        why = f"{path} cannot be read: {fault.strerror}; mend its permissions or remove it"
        raise InvalidSettings(why, param=path.name) from None
    return _parsed(path, content)


def _parsed(path: Path, content: bytes) -> Mapping[str, Any]:
    """The tables of the file's content. Raises InvalidSettings."""
    if len(content) > _FILE_LIMIT:
        raise InvalidSettings(
            f"{path} has more than {_FILE_LIMIT} bytes; make it shorter", param=path.name
        )
    try:
        return tomllib.loads(content.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as fault:
        why = f"{path} is no TOML: {fault}; mend that place, until then the earlier profiles count"
        raise InvalidSettings(why, param=path.name) from None


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


async def profiled(profiles: ProfileFile, request: GenerationRequest) -> GenerationRequest:
    """The request, to the profile's model if it names one.

    Raises ModelNotFound for a profile with a fault.
    """
    await profiles.refresh()
    try:
        profile = profiles.get(request.model)
    except ExoNodeError as fault:
        raise ModelNotFound(fault.message, param="model") from fault
    return request if profile is None else apply_profile(profile, request)


def apply_profile(profile: Profile, request: GenerationRequest) -> GenerationRequest:
    """The request to the profile's model, with the profile's fields where it sets none."""
    sampling, fields = profile.sampling()
    keep_alive, trusted = request.keep_alive_s, request.trusted
    if keep_alive is None:
        keep_alive, trusted = profile.keep_alive, True  # the node's own user wrote it
    k = request.num_draft_tokens
    own_fields = fields - request.explicit_fields
    changed = replace(
        request,
        model=ModelId(profile.model),
        profile=request.model,
        sampling=_sampling(request, sampling, own_fields),
        explicit_fields=request.explicit_fields | own_fields,
        profile_fields=own_fields,
        limits=completed(request.limits, filled(pb.Limits, profile)),
        sharing=completed(
            request.sharing, filled(pb.Sharing, profile, background=profile.is_background)
        ),
        num_draft_tokens=profile.num_draft_tokens if k is None else k,
        draft_policy=request.draft_policy or profile.draft_policy,
        keep_alive_s=keep_alive,
        trusted=trusted,
    )
    if (request.text, request.ids, request.embeddings) != (None, None, None):
        return changed  # there is no template
    return replace(
        changed,
        messages=_messages(request, profile.system),
        options=merge_options(profile.template_options, request.options),
    )


def _sampling(request: GenerationRequest, defaults: Sampling, names: frozenset[str]) -> Sampling:
    """The request's sampling with the fields `names` of `defaults`."""
    return replace(request.sampling, **{name: getattr(defaults, name) for name in names})


def _messages(request: GenerationRequest, system: str | None) -> tuple[Mapping[str, Any], ...]:
    messages = request.messages
    if system is None or (messages and messages[0].get("role") == "system"):
        return messages
    return ({"role": "system", "content": system}, *messages)
