"""Sharded execution: checkpoints, stages, links, the text engine and the runner process."""
