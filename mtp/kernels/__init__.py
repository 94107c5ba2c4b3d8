"""Kernels of our own for MLX's CUDA backend, and the choice between them and MLX's."""
