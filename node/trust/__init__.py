"""Keys, identities and certificates.

api_tokens.py: the API tokens as a node knows them
certificates.py: the certificates of mutual TLS
cluster_key.py: the cluster's key on disk, and what joining does to it
keyring.py: this node's keys
keys.py: the cluster key and the node's identity
local_token.py: the token that lets this user's commands and browser in
token_file.py: the API tokens on disk
"""
