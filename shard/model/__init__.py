"""Layers [a, b) of any mlx-lm model: loaded, measured, checked.

bare_mlx_vlm.py: empty packages around the modules of mlx-vlm
embedder.py: models as embedders: tensors without a prefix, hidden states, pooling
encoder.py: encoders: hidden states of a text, alone or in a padded batch
fusing.py: finds a compiler for the operations that MLX fuses on a CPU
head_files.py: the arrays of a draft head
kv_quantisation.py: attention's caches in 4 or 8 bits
layer_probe.py: seconds of a layer, measured at load
layer_view.py: a stage's view of a model's list of layers
load.py: loads a stage by its specification
loader_import.py: imports mlx-lm's loader without side effects
model_faults.py: the errors of a model class that does not fit its config.json
numeric.py: checks that numbers are finite, and the errors if they are not
open_model.py: a whole model with lazy weights, and the weights of some of its layers
small_config.py: a small model of the same class and depth
split_check.py: checks that a stage computes the same as its layers in the whole model
stage_limits.py: the sizes of the frames that a stage accepts
stage_model.py: layers [a, b) of a model, with their caches
tensors.py: arrays to bytes and back
tower.py: the vision tower beside a text model
tower_modules.py: the modules of towers, by family
"""
