"""CUDA kernels for a few rows, each tried against MLX's own before it is used.

attention.py: attention of a few rows, one by one
cuda.py: compiles and runs a kernel
gated_delta.py: the recurrence of a gated delta layer, and the layer around it
product.py: products of a few rows with dense and 4-bit weights
trial.py: one kernel against MLX's own
"""
