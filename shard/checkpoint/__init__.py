"""A model's files, and those of cached prefixes, read as hostile input; free of MLX.

chat_format.py: the abilities of a chat template
checkpoint.py: a folder as a validated table of tensors
drafters.py: for which models a block drafter drafts, and what it takes
embedders.py: what an encoder computes, and how an embedder pools
files.py: small files, replaced whole or not at all; the node's, too
generation_config.py: the publisher's sampling and end tokens
gguf_file.py: the header of a GGUF file: its values and tensors
head_tensors.py: where a native MTP head lies in a checkpoint, and by which names
headers.py: one safetensors header, checked; small files, and those that a model need not have
model_classes.py: the model types that there are classes of
prefix_files.py: files of cached prefixes: on disk, their bound, and from another runner
python_source.py: Python source as syntax trees, without running it
vision.py: how a model reads images, by its config.json; the extra, and a tower's tensors
"""
