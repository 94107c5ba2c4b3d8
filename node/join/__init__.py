"""How a node gets the cluster's key: digits on the new node, typed at a member.

approver.py: the cluster's side of a join
asker.py: the new node's side of a join
duplicates.py: two processes with one node id, from a copied data folder
handshake.py: who asks whom, and the 20 rounds that prove the digits; pure
joining.py: joining put together
open_proof.py: the password proof of `--open`; pure
operations.py: what a person decides: approve, deny, leave, change the key
port.py: the join port
pursuits.py: which clusters a new node calls
rekey.py: a new cluster key for the nodes that stay
requests.py: who waits, and the limits; pure
state.py: what both sides share
wire.py: frames over TLS
"""
