"""Layers [a, b) of any mlx-lm model: loaded, measured, checked.

block_drafter.py: a block drafter beside its target, by mlx-vlm's layers
draft_pair.py: a model's own head and a block drafter together
embedder.py: models as embedders: tensors without a prefix, hidden states, pooling, encoders
fusing.py: has MLX fuse operations on a CPU: with which compiler, at load or beside answers
layer_probe.py: seconds of a layer, measured at load
layer_view.py: a stage's view of a model's list of layers
load.py: loads a stage by its specification
loader_import.py: imports mlx-lm's loader without side effects
open_model.py: a whole model with lazy weights, and those of some of its layers or of its head
small_config.py: a small model of the same class and depth
split_check.py: checks that a stage computes the same as its layers in the whole model
stage_limits.py: the sizes of the frames that a stage accepts
stage_model.py: layers [a, b) of a model, with their caches, quantised or not
stored_rows.py: which numbers of rows agree, on disk
tensors.py: arrays to bytes and back, and the errors of numbers that are not finite
tower.py: the vision tower beside a text model, by family
vlm_classes.py: classes of models that mlx-lm lacks, of mlx-vlm's modules
vlm_text.py: mlx-vlm's text models with plain caches
"""
