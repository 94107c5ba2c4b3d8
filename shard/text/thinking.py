"""The variables that make a chat template's model reason more, less, or not at all."""

import re
from collections.abc import Callable, Mapping
from functools import cache, cached_property
from typing import Any, Final, Literal, get_args

Level = Literal["minimal", "low", "medium", "high", "xhigh", "max"]
Effort = Literal["", "none"] | Level

LEVELS: Final[tuple[Level, ...]] = get_args(Level)
HARMONY_LEVELS: Final[tuple[Level, ...]] = ("low", "medium", "high")
"""The levels of the Harmony specification; templates of that format print any other word too."""
_SWITCHES: Final = ("enable_thinking", "thinking")
"""Names of the variable that turns reasoning on and off."""
_EFFORT: Final = "reasoning_effort"
_BUDGET: Final = "thinking_budget"


class ThinkingVariables:
    """Translates requests about reasoning to the variables of one chat template.

    Templates refuse efforts that they do not name, so each level is rendered once, at the first
    request with one: a template that never ends then costs that request and not the load.
    """

    def __init__(
        self,
        text: str,
        renders: Callable[[Mapping[str, Any]], bool],
        *,
        thinks: bool,
        levels: tuple[Level, ...] = LEVELS,
    ) -> None:
        """`text`: the template's. `renders`: whether it renders a short chat with these variables.

        `thinks`: whether the model reasons by default. `levels`: the levels to try.
        """
        self._text = text
        self._renders = renders
        self._thinks = thinks
        self._candidates = levels
        self._switches = [name for name in _SWITCHES if self.has(name)]

    def has(self, variable: str) -> bool:
        return _word(variable).search(self._text) is not None

    def choose(
        self, effort: Effort, switch: bool | None, budget: int, notes: list[str]
    ) -> dict[str, Any]:
        """The variables for a request; appends to `notes` what the template does not support.

        `switch`: reasoning on or off, None for the default. `budget`: tokens, 0 for no limit.
        """
        if switch is False or effort == "none":
            return self._off(notes)
        variables: dict[str, Any] = dict.fromkeys(self._switches, True) if switch or effort else {}
        if switch and not (self._switches or self._can_think):
            notes.append("thinking (the model has none)")
        if effort:
            level = self.nearest(effort)
            if level != effort:
                instead = f"{level} is the nearest it has" if level else "the model has no levels"
                notes.append(f"reasoning effort {effort} ({instead})")
            variables |= {_EFFORT: level} if level else {}
        if budget and self.has(_BUDGET):
            variables[_BUDGET] = budget
        elif budget:
            notes.append("a budget of thinking (the model has none)")
        return variables

    def nearest(self, effort: Level) -> Level | None:
        """The nearest accepted level, of two the higher one; None if there is none."""
        rank = LEVELS.index
        return min(
            self.levels,
            key=lambda level: (abs(rank(level) - rank(effort)), -rank(level)),
            default=None,
        )

    @cached_property
    def levels(self) -> tuple[Level, ...]:
        """The efforts that the template accepts."""
        if not self.has(_EFFORT):
            return ()
        on = dict.fromkeys(self._switches, True)
        return tuple(each for each in self._candidates if self._accepts({**on, _EFFORT: each}))

    @property
    def _can_think(self) -> bool:
        return self._thinks or self.has(_EFFORT)

    def _off(self, notes: list[str]) -> dict[str, Any]:
        """The variables that turn reasoning off; none for a model that does not reason."""
        switches_off: dict[str, Any] = dict.fromkeys(self._switches, False)
        if switches_off and self._accepts(switches_off):
            return switches_off
        named = self.has(_EFFORT) and re.search(r"['\"]none['\"]", self._text)
        if named and self._accepts({_EFFORT: "none"}):
            return {_EFFORT: "none"}
        if not (switches_off or self._can_think):
            return {}
        least = self.levels[:1]
        instead = f"; {least[0]} is the least it has" if least else ""
        notes.append(f"thinking off (the model cannot be kept from thinking{instead})")
        return {_EFFORT: least[0]} if least else {}

    def _accepts(self, variables: Mapping[str, Any]) -> bool:
        """Whether the template accepts the variables.

        True as well if it refuses the short chat without any, which proves nothing.
        """
        return self._renders(variables) or not self._renders_plainly

    @cached_property
    def _renders_plainly(self) -> bool:
        return self._renders({})


@cache
def _word(variable: str) -> re.Pattern[str]:
    return re.compile(rf"\b{re.escape(variable)}\b")
