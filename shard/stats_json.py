"""The final stats as the JSON object that the API shows."""

import dataclasses
import json

from ..mtp.types import GenerationStats


def stats_json(stats: GenerationStats, identity: str) -> str:
    """`GenerationStats` with `greedy_identity`; token counts stay in, for `usage`."""
    return json.dumps({**dataclasses.asdict(stats), "greedy_identity": identity})
