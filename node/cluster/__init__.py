"""Membership and election: the nodes, their liveness, and the head.

change_log.py: changes of membership and election as events
cluster.py: the members and the head, and what follows from heartbeats
cluster_state.py: membership and election together, fed by heartbeats; pure
desired.py: the models that should be loaded: sent by the head, recorded by the others
discovery.py: mDNS: addresses to dial
election.py: which node is the head; pure
exchanges.py: dials addresses and exchanges heartbeats with them
member.py: the other nodes by their heartbeats; pure
membership.py: alive, suspect, dead; pure
node_exit.py: the reason why a node ends by itself
term_file.py: the head's term on disk
"""
