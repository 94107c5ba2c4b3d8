"""Cards of the models that run or are desired, looked up once and beside the passes."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Set

from ...placement.card import ModelCard
from ...placement.errors import ExoNodeError
from ...placement.ids import ModelId
from ..machine.tasks import background
from .stages import Facts

log = logging.getLogger(__name__)


class ModelCards:
    """`by_model` and `fingerprints` hold what was found; `close` ends what is being looked up."""

    def __init__(self, facts: Facts, changed: Callable[[], None]) -> None:
        self._facts = facts
        self._changed = changed
        self._unknown: set[ModelId] = set()
        self._tasks: dict[ModelId, asyncio.Task[None]] = {}
        self.by_model: dict[ModelId, ModelCard] = {}
        self.fingerprints: dict[ModelId, str] = {}
        """The hashes of this node's files; empty where it has none."""

    async def resolve(self, model: ModelId) -> None:
        """Reads a model's card. Raises ModelNotFound, InvalidCard and InvalidCheckpoint."""
        self.by_model[model], self.fingerprints[model] = await self._facts.card(model)
        self._unknown.discard(model)

    def of(self, model: ModelId) -> tuple[ModelCard, str]:
        """The card of a resolved model, and its fingerprint."""
        return self.by_model[model], self.fingerprints[model]

    def look_up(self, models: Iterable[ModelId]) -> Set[ModelId]:
        """Looks up what is not known yet; `changed` is called after each. Returns the models that
        are being looked up."""
        for model in {*models} - self.by_model.keys() - self._unknown - self._tasks.keys():
            self._tasks[model] = background(self._look_up(model), "the card of a model")
        return self._tasks.keys()

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            _ = task.cancel()
        _ = await asyncio.gather(*tasks, return_exceptions=True)

    async def _look_up(self, model: ModelId) -> None:
        try:
            await self.resolve(model)
        except ExoNodeError as fault:
            self._unknown.add(model)
            log.warning("%s, which runs or is desired, has no card here: %s", model, fault)
        finally:
            _ = self._tasks.pop(model, None)
            self._changed()
