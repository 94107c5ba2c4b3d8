"""The node process: its parts put together, started, and closed in reverse.

head_client.py: calls to whichever node is the head, this one included
local_node.py: what a node is by itself: identity, address, models, runners
model_list.py: the lists of models that the node shows
node.py: the node: its parts put together and closed in reverse
node_api.py: the node's HTTP application and its background loops
node_models.py: the models' files: found on the hub, downloaded, deleted
operations.py: the state that the operations API shows and changes
peering.py: a node among others: membership, joining, and where peers are looked for
run.py: the life of the process, from settings to exit status
"""
