"""The settings that the page changes: a variable wins, else the page, else the default."""

from collections.abc import Mapping
from typing import Any, Literal, Self, cast, get_args

from ...placement.drafting import EnabledState
from ...placement.errors import InvalidRequest
from .awake import KeepAwake
from .settings import SOURCES, Settings

SwitchName = Literal["native_mtp_enabled", "native_mtp_async_draft_eval", "native_mtp_adaptive"]
Name = SwitchName | Literal["keep_awake"]
Value = bool | KeepAwake
NAMES: tuple[Name, ...] = (*get_args(SwitchName), "keep_awake")
PAGE = "the settings page"


class Switches:
    """Values at run time; the environment fixes those whose entry in `fixed_values` is not None."""

    def __init__(self, fixed_values: Mapping[Name, Value | None]) -> None:
        self._fixed = fixed_values
        self._changed: dict[Name, Value] = {}
        self._awake_refusal = ""

    @classmethod
    def of(cls, settings: Settings) -> Self:
        return cls({name: getattr(settings, name) for name in NAMES})

    def value(self, name: SwitchName) -> bool:
        return bool(self._value(name))

    @property
    def keep_awake(self) -> KeepAwake:
        return cast(KeepAwake, self._value("keep_awake"))

    def note_awake_refusal(self, why: str) -> None:
        self._awake_refusal = why

    def _value(self, name: Name) -> Value:
        fixed, default = self._fixed[name], "answers" if name == "keep_awake" else True
        return self._changed.get(name, default) if fixed is None else fixed

    def fixed(self, name: SwitchName) -> bool | None:
        """The value that the environment fixes; None where it fixes none."""
        return None if self._fixed[name] is None else self.value(name)

    def change(self, values: Mapping[Name, Value]) -> None:
        """Changes values from now on. Raises InvalidRequest for one that is fixed."""
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

    def _describe(self, name: Name) -> dict[str, Any]:
        fixed = self._fixed[name] is not None
        source = "environment" if fixed else "runtime" if name in self._changed else "default"
        reason = f"fixed by {self._assignment(name)}" if fixed else ""
        if name == "keep_awake" and self.keep_awake != "never":
            reason = "; ".join(filter(None, (reason, self._awake_refusal)))
        own = {"value": self._value(name), "source": source}
        return {**own, "writable": not fixed, "reason": reason}

    def _assignment(self, name: Name) -> str:
        value = self._value(name)
        return f"{SOURCES[name].variable}={int(value) if isinstance(value, bool) else value}"
