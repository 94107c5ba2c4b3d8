"""Makes checkpoints from others: quantised copies, copies with an MTP head added, and folders from
GGUF files.

gguf_arrays.py: blocks of GGUF's tensors as MLX arrays
gguf_model.py: config.json and the names of tensors of a GGUF file
gguf_tokenizer.py: its tokenizer, chat template and generation settings
graft.py: adds the head of one checkpoint to another that it belongs to
import_gguf.py: the child process of `exo-node models import`
main.py: the child process of `exo-node models graft` and `convert`
shards.py: writes weights a file at a time, in a folder that appears when it is whole
"""
