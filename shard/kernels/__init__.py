"""Kernels of our own, each tried against MLX's own before it is used, and what is compiled.

alias.py: what stands for a kernel's code in its launches
attention.py: MLX's attention of a few rows, one by one
attention_choice.py: which attention serves a few rows
chunked_delta.py: the gated delta rule over a prompt in plain MLX operations
compiler.py: compiles kernels and keeps their code on disk
cpu_code.py: machine code of products on CPUs, and whether this machine can have it
cpu_products.py: float32 products on Linux CPUs, in the place of the BLAS that MLX brings
cuda.py: runs a kernel
first_choices.py: ways of choosing tokens, each taken once while a model loads
fused.py: parts of decoder layers in fewer launches
fused_choice.py: which parts of layers compute in fewer launches
fused_code.py: a folder for what MLX compiles, apart from other users and processes
gated_delta.py: the recurrence of a gated delta layer, and the layer around it
install.py: puts all of them under a loaded model
kept_code.py: machine code on disk
kernel_choice.py: which CUDA kernel computes each layer
layer_choice.py: which decoder layers are traced
layers.py: decoder layers that are traced once for each number of rows
product.py: products of a few rows with dense weights and those of 4 and 8 bits
row_attention.py: attention of a few rows in kernels of our own
trial.py: one kernel against MLX's own
unpacked.py: products of many rows with quantised weights
"""
