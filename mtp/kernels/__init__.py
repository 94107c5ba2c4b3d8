"""CUDA kernels for a few rows, each tried against MLX's own before it is used.

alias.py: what stands for a kernel's code in its launches
attention.py: MLX's attention of a few rows, one by one
compiler.py: compiles kernels and keeps their code on disk
cuda.py: runs a kernel
fused.py: parts of decoder layers in fewer launches
gated_delta.py: the recurrence of a gated delta layer, and the layer around it
kept_code.py: machine code on disk
layers.py: decoder layers that are traced once for each number of rows
product.py: products of a few rows with dense weights and those of 4 and 8 bits
row_attention.py: attention of a few rows in kernels of our own
trial.py: one kernel against MLX's own
unpacked.py: products of many rows with quantised weights
"""
