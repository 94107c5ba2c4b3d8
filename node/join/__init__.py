"""How a node gets the cluster's key: digits on the new node, typed at a member.

approver.py: the cluster's side of a join
asker.py: the new node's side of a join
calls.py: which join ports a new node calls and asks; pure
duplicates.py: two processes with one node id, from a copied data folder
handshake.py: which node asks which, and the 20 rounds that prove the digits; pure
joining.py: the parts of joining, put together; what a person reads on the terminal
operations.py: a person's decisions: approve, deny, take a key, leave
port.py: the join port
requests.py: the nodes that wait, and the limits on attempts; pure
state.py: state that both sides share
wire.py: frames over TLS
"""
