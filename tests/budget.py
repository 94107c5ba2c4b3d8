"""The number of random examples of a run.

Each example has all kinds of events. `make test` runs few, the same in each run;
`make test ARGS=--hypothesis-profile=search` runs many.
"""

import hypothesis


def seeds(steady: int, search: int) -> range:
    """The seeds of one random test, by the hypothesis profile of this run."""
    return range(search if hypothesis.settings.get_current_profile_name() == "search" else steady)
