"""A model's files, read as hostile input and fetched from the hub; free of MLX.

chat_format.py: the abilities of a chat template
checkpoint.py: a folder as a validated table of tensors
download.py: from the hub into its ordinary cache
fetch.py: one file over HTTP, resumed and hashed
files.py: small files, replaced whole or not at all; the node's, too
head_layouts.py: which tensors an MTP head has
head_storage.py: how each of them may be stored
head_tensors.py: where a native MTP head lies in a checkpoint
headers.py: one safetensors header, checked
hub_cache.py: the cache of the hub: what it holds
hub_download.py: asks the hub, and fetches what the cache lacks
model_classes.py: the model types that the installed mlx-lm implements
progress.py: how far a download or a copy is
stage_files.py: which weight files one stage reads
"""
