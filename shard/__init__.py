"""Sharded execution: checkpoints, models, pipelines, the text engine and the runner process."""
