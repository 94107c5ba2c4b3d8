"""How long models stay loaded without use: the setting, and what requests say (`keep_alive`)."""

import math
from collections.abc import Callable, Collection

from ...placement.ids import ModelId
from ..cluster.desired import NEVER, DesiredPlacements
from ..machine.setting_values import LONGEST
from .loaded_placement import LoadedPlacement
from .state import Desired


class Stays:
    """Writes to what is desired; the reconciler unloads what is not used for so long."""

    def __init__(
        self, desired: DesiredPlacements, keep_alive_s: float, clock: Callable[[], float]
    ) -> None:
        """`keep_alive_s`: the setting; infinity for ever."""
        self._desired = desired
        self._keep_alive_s = keep_alive_s
        self._clock = clock

    def touch(self, model: ModelId) -> None:
        """It is used now."""
        self._desired.change(model, used_at=self._clock())

    def extend(self, model: ModelId, keep_alive_s: float, *, trusted: bool) -> None:
        """A request says how long the model stays. Not `trusted`: that lengthens its stay at most,
        up to the setting, since another user of the machine may not unload what all use."""
        if not trusted:
            keep_alive_s = min(keep_alive_s, self._keep_alive_s)
            if keep_alive_s <= self.patience_s(model):
                return
        self._desired.change(model, keep_alive_s=keep_alive_s)

    def left_s(self, record: LoadedPlacement) -> float:
        """Seconds until the model is unloaded if it is not used; infinity for never."""
        model = record.card.id
        if (desired := self._desired.get(model)) is None:
            return math.inf
        idle_s = 0.0 if record.activity.requests else self._clock() - desired.used_at
        return max(0.0, self.patience_s(model) - max(0.0, idle_s))

    def patience_s(self, model: ModelId) -> float:
        """Seconds without use after which it is unloaded; infinity for never."""
        desired = self._desired.get(model)
        own_s = None if desired is None else desired.keep_alive_s
        patience_s = self._keep_alive_s if own_s is None else own_s
        return patience_s if patience_s <= LONGEST else math.inf

    def wishes(self, models: Collection[ModelId]) -> list[Desired]:
        """The desired models that have a card, as the reconciler reads them."""
        return [
            Desired(
                model,
                each.options,
                each.replicas,
                each.auto_replicas,
                # One that another head was asked for is older than all that happens here.
                max(each.requested_at, 0.0) if each.requested else NEVER,
                self.patience_s(model),
                each.used_at,
            )
            for model, each in self._desired.models.items()
            if model in models
        ]
