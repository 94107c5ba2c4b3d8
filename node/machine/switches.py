"""The native-MTP switches: a variable wins, else the settings page, else on."""

from collections.abc import Mapping
from typing import Any, Literal, Self

from ...placement.drafting import EnabledState
from ...placement.errors import InvalidRequest
from .settings import Settings

SwitchName = Literal["native_mtp_enabled", "native_mtp_async_draft_eval", "native_mtp_adaptive"]
VARIABLES: Mapping[SwitchName, str] = {
    "native_mtp_enabled": "EXO_NATIVE_MTP_ENABLED",
    "native_mtp_async_draft_eval": "EXO_NATIVE_MTP_ASYNC_DRAFT_EVAL",
    "native_mtp_adaptive": "EXO_NATIVE_MTP_ADAPTIVE",
}
PAGE = "the settings page"


class Switches:
    """Values at run time; `given` holds what the environment fixed (None: nothing)."""

    def __init__(self, given: Mapping[SwitchName, bool | None]) -> None:
        self._given = given
        self._changed: dict[SwitchName, bool] = {}

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """As the settings leave them at the start."""
        return cls({name: getattr(settings, name) for name in VARIABLES})

    def value(self, name: SwitchName) -> bool:
        given = self._given[name]
        return self._changed.get(name, True) if given is None else given

    def fixed(self, name: SwitchName) -> bool | None:
        """What the environment says; None where it says nothing."""
        return self._given[name]

    def change(self, wanted: Mapping[SwitchName, bool]) -> None:
        """For new requests. Raises InvalidRequest for one that the environment fixed."""
        for name in wanted:
            if self._given[name] is not None:
                raise InvalidRequest(
                    f"{name} is fixed by {self._assignment(name)}; unset the variable and start "
                    "the node again to change it here",
                    param=name,
                )
        self._changed.update(wanted)

    def mtp(self) -> EnabledState:
        """`native_mtp_enabled` with where it was set, for the drafting reason."""
        name: SwitchName = "native_mtp_enabled"
        if self._given[name] is not None:
            return EnabledState(self.value(name), self._assignment(name))
        return EnabledState(self.value(name), PAGE if name in self._changed else "the default")

    def describe(self) -> dict[str, Any]:
        """The body of `GET /v1/settings`."""
        return {name: self._describe(name) for name in VARIABLES}

    def _describe(self, name: SwitchName) -> dict[str, Any]:
        fixed = self._given[name] is not None
        source = "environment" if fixed else "runtime" if name in self._changed else "default"
        reason = f"fixed by {self._assignment(name)}" if fixed else ""
        return {
            "value": self.value(name),
            "source": source,
            "writable": not fixed,
            "reason": reason,
        }

    def _assignment(self, name: SwitchName) -> str:
        return f"{VARIABLES[name]}={int(self.value(name))}"
