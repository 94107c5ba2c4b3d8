"""Models on this node's disk: where each is, how it arrives, and what peers may copy of it.

block_drafters.py: block drafters, found and fitted to models
copy_folder.py: what a peer offers, and the folder of its copy
fetching.py: gets a model from this disk, from peers or from the hub
file_facts.py: facts of a model's files beside its card, read again once one has changed
gguf_places.py: GGUF files on this disk, Ollama's and LM Studio's too, to be imported
head_source.py: where an MTP head is taken from
hub_cache.py: the Hugging Face cache: its snapshots, and their removal
hub_client.py: the client of the hub: its lists, bounded as a whole, and its faults in words
hub_download.py: downloads from the Hugging Face hub into its cache
hub_search.py: searches the hub: sizes and config.json of what it finds
identifiers.py: names, commits and hashes from outside, checked before they are parts of paths
library.py: models by id, with their cards
listing.py: models as lists show them; a checkpoint's pre-flight
model_folder.py: one model's folder: its origin, the files that count, its changes
peer_copy.py: one model's files on their way from one peer
places.py: where models are on this disk
pulls.py: downloads that people asked for: followed, paused, resumed, cancelled
sharing.py: the files that peers may copy
sources.py: the peers that have a model, and what a placement would copy from them
stop_signal.py: threads that talk to the hub, and the signal that ends them
transfers.py: one file on its way: its partial file, its hash, its progress
user_cards.py: a person's own cards
"""
