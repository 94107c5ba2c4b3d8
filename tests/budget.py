"""How many random examples a run pays for: a budget, and no claim.

Each example has all kinds of events. `make test` runs few, the same in each run;
`make test ARGS=--hypothesis-profile=search` runs many.
"""

import hypothesis


def seeds(steady: int, search: int) -> range:
    """Of one random test, by the profile of this run."""
    return range(search if hypothesis.settings.get_current_profile_name() == "search" else steady)
