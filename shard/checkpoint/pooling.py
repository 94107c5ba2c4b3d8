"""How an embedder's publisher makes one embedding of all hidden states, in a file of its own."""

from pathlib import Path
from typing import Final

from ...placement.errors import InvalidCheckpoint
from .headers import read_object

POOLING_FILE: Final = "1_Pooling/config.json"
"""sentence-transformers writes it beside the weights."""


def pools_last_token(folder: Path) -> bool | None:
    """Whether the last token's hidden state is the embedding; None: the folder does not say.

    Raises InvalidCheckpoint.
    """
    path = folder / POOLING_FILE
    if not path.exists():
        return None
    config = read_object(path)
    return config.get("pooling_mode_lasttoken") is True or config.get("pooling_mode") == "lasttoken"


def require_last_token(folder: Path) -> None:
    """Raises InvalidCheckpoint if the folder says that embeddings are made in another way."""
    if pools_last_token(folder) is False:
        raise InvalidCheckpoint(
            f"{folder.name}: {POOLING_FILE} does not say that the last token's hidden state is the "
            "embedding, and this engine computes no other; use another embedder",
            param=POOLING_FILE,
        )
