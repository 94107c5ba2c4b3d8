"""The native-MTP switches: a variable wins, else the settings page, else on."""

from collections.abc import Mapping
from typing import Any, Literal, Self, get_args

from ...placement.drafting import EnabledState
from ...placement.errors import InvalidRequest
from .settings import SOURCES, Settings

SwitchName = Literal["native_mtp_enabled", "native_mtp_async_draft_eval", "native_mtp_adaptive"]
NAMES: tuple[SwitchName, ...] = get_args(SwitchName)
PAGE = "the settings page"


class Switches:
    """Values at run time; the environment fixes those whose entry in `fixed_values` is not None."""

    def __init__(self, fixed_values: Mapping[SwitchName, bool | None]) -> None:
        self._fixed = fixed_values
        self._changed: dict[SwitchName, bool] = {}

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """The switches at the start of a node."""
        return cls({name: getattr(settings, name) for name in NAMES})

    def value(self, name: SwitchName) -> bool:
        fixed = self._fixed[name]
        return self._changed.get(name, True) if fixed is None else fixed

    def fixed(self, name: SwitchName) -> bool | None:
        """The value that the environment fixes; None where it fixes none."""
        return self._fixed[name]

    def change(self, values: Mapping[SwitchName, bool]) -> None:
        """Changes values for new requests. Raises InvalidRequest for one that is fixed."""
        for name in values:
            if self._fixed[name] is not None:
                raise InvalidRequest(
                    f"{name} is fixed by {self._assignment(name)}; unset the variable and start "
                    "the node again to change it here",
                    param=name,
                )
        self._changed.update(values)

    def mtp(self) -> EnabledState:
        """`native_mtp_enabled` with where it was set, for the drafting reason."""
        name: SwitchName = "native_mtp_enabled"
        if self._fixed[name] is not None:
            return EnabledState(self.value(name), self._assignment(name))
        return EnabledState(self.value(name), PAGE if name in self._changed else "the default")

    def describe(self) -> dict[str, Any]:
        """The body of `GET /v1/settings`."""
        return {name: self._describe(name) for name in NAMES}

    def _describe(self, name: SwitchName) -> dict[str, Any]:
        fixed = self._fixed[name] is not None
        source = "environment" if fixed else "runtime" if name in self._changed else "default"
        reason = f"fixed by {self._assignment(name)}" if fixed else ""
        own = {"value": self.value(name), "source": source}
        return {**own, "writable": not fixed, "reason": reason}

    def _assignment(self, name: SwitchName) -> str:
        return f"{SOURCES[name].variable}={int(self.value(name))}"
