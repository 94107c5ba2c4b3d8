"""Which nodes there are, which of them live, and which is the head.

change_log.py: changes of membership and election as events
cluster.py: the members and the head, and what follows from heartbeats
cluster_state.py: membership and election together, fed by heartbeats; pure
desired.py: desired placements: published by the head, learned by the others
discovery.py: mDNS: addresses to dial
election.py: which node is the head; pure
exchanges.py: dials addresses and exchanges heartbeats with them
heartbeats.py: heartbeats as messages
held.py: what heads hold, kept for the next head
log_once.py: what was logged already, so that it is not repeated; pure
member.py: what is known of each other node
member_facts.py: one live node as its heartbeats describe it
membership.py: alive, suspect, dead; pure
news.py: wakes whoever waits for news of the cluster
node_exit.py: why a node ends by itself
reach.py: whether heartbeats pass both ways, and how clocks differ; pure
term_file.py: the head's term on disk
"""
