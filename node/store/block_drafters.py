"""The block drafters on this node's disk, and whether each fits a model."""

from collections.abc import Callable, Sequence
from pathlib import Path

from pydantic import ValidationError

from ...placement.card import SHIPPED_MAX_K, BlockDrafter, ModelCard
from ...placement.errors import InvalidRequest
from ...placement.ids import ModelId
from ...shard.checkpoint.checkpoint import Checkpoint
from ...shard.checkpoint.drafters import (
    DrafterFacts,
    DrafterUnusable,
    absent_drafter,
    read_drafter,
    reading_drafter,
)
from .hub_cache import HubCache
from .places import in_folders


class BlockDrafters:
    """Finds drafters and reads their headers; its methods block."""

    def __init__(self, roots: Sequence[Path], checkpoint: Callable[[Path], Checkpoint]) -> None:
        """`roots`: the folders of models. `checkpoint`: the headers of one."""
        self._roots, self._checkpoint = roots, checkpoint

    def folder(self, drafter: ModelId) -> Path:
        """The folder of a drafter. Raises DrafterUnusable."""
        for place in in_folders(self._roots):
            if place.id == drafter and not place.partial:
                return place.folder
        with reading_drafter(drafter):
            folder = HubCache().find(drafter)
        if folder is None:
            raise absent_drafter(drafter)
        return folder

    def choose(self, card: ModelCard, name: str) -> BlockDrafter:
        """The drafter `name`, an id or a model's folder, for a card's model.

        Raises InvalidRequest where it is not here or does not fit.
        """
        try:
            if card.embeds:
                raise DrafterUnusable(f"{card.id} is an embedder, which drafts nothing")
            facts = self._facts(model := self._id(name))
            drafter = card.drafter
            if drafter is None or drafter.model != model:
                drafter = BlockDrafter(model=model, max_k=min(SHIPPED_MAX_K, facts.most_drafts))
            facts.require_fit(card.vocab_size, card.hidden_width, card.num_layers, drafter.max_k)
        except (DrafterUnusable, ValidationError) as fault:
            raise InvalidRequest(f"drafter: {fault}, or leave it out", param="drafter") from fault
        return drafter.model_copy(update=facts.sizes)

    def facts(self, card: ModelCard) -> DrafterFacts:
        """The facts of the card's drafter, which fits it. Raises DrafterUnusable."""
        assert card.drafter is not None
        facts, most = self._facts(card.drafter.model), card.drafter.max_k
        facts.require_fit(card.vocab_size, card.hidden_width, card.num_layers, most)
        return facts

    def with_sizes(self, card: ModelCard) -> ModelCard:
        """The card with the sizes of its drafter, where it lacks them and the files have them."""
        drafter = card.drafter
        if drafter is None or drafter.weight_bytes:
            return card
        try:
            sizes = self.facts(card).sizes
        except DrafterUnusable:  # the state of what drafts for the model says why
            return card
        return card.model_copy(update={"drafter": drafter.model_copy(update=sizes)})

    def _facts(self, model: ModelId) -> DrafterFacts:
        folder = self.folder(model)
        with reading_drafter(model):
            return read_drafter(self._checkpoint(folder), model)

    def _id(self, name: str) -> ModelId:
        """The id of a drafter by id or folder. Raises DrafterUnusable for another folder."""
        if not (path := Path(name)).is_absolute():
            return ModelId(name)
        for place in in_folders(self._roots):
            if path in (place.folder, place.folder.resolve()):
                return place.id
        raise DrafterUnusable(
            f"{name} is in none of the head's folders of models; put it into one, or start the "
            "node with --models-dir"
        )
