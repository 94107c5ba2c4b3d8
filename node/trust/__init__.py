"""Keys, identities and certificates.

certificates.py: the certificates of mutual TLS
cluster_key.py: the cluster's key on disk, and what joining does to it
keyring.py: this node's keys
keys.py: the cluster key and the node's identity
local_token.py: the token that lets this user's commands and browser in
"""
