"""Our own kernels, each tried against MLX's before it is used, and the compilation of both.

attention_choice.py: chooses the attention of a few rows
chunked_delta.py: the gated delta rule over a prompt in plain MLX operations
code_store.py: machine code on disk
compiler.py: compiles CUDA kernels
cpu_code.py: machine code of products on CPUs, and whether this machine can use it
cpu_products.py: float32 products on Linux CPUs in place of MLX's BLAS
cuda.py: runs a kernel
first_choices.py: ways of choosing tokens, each run once while a model loads
fused.py: parts of decoder layers in fewer launches
fused_code.py: a private folder for the code that MLX compiles
gated_delta.py: the recurrence of a gated delta layer, and the layer around it
install.py: installs all of them in a loaded model
kernel_choice.py: chooses the CUDA kernel of each layer
key_sets.py: measures up to how many rows and keys attention has the bits of single rows
layers.py: decoder layers that are traced once for each number of rows
own_keys.py: attention of a few rows, each over the keys of its single step
product.py: products of a few rows with dense weights and those of 4 and 8 bits
row_attention.py: attention of a few rows in kernels of our own
row_groups.py: products that compute their rows in groups that agree
row_products.py: the products of a model, experts and routers among them
row_sets.py: measures which numbers of rows give a product the same bits
trial.py: one kernel against MLX's own
unpacked.py: products of many rows with quantised weights
"""
