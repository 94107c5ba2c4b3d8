"""Layers [a, b) of any mlx-lm model: loaded, measured, checked.

fusing.py: a compiler for operations that MLX fuses on a CPU, or none
head_files.py: a draft head's tensors, out of its files
kv_quantisation.py: attention's caches in 4 or 8 bits
layer_probe.py: seconds of a layer, measured at load
layer_view.py: some layers in the place of a model's all
load.py: loads what a stage's specification asks for
loader_import.py: imports mlx-lm's loader, also where few files may be open
numeric.py: whether numbers are finite, and what is said where they are not
small_config.py: a small model of the same class and depth
split_check.py: whether a stage computes what its layers do in the whole model
stage_limits.py: what a stage accepts in a frame
stage_model.py: layers [a, b) of a model, with their caches
tensors.py: arrays to bytes and back
"""
