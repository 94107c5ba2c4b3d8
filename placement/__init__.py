"""Where a model runs: cards, cluster facts, the planner and the choice of drafter. Pure."""
