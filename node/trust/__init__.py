"""Keys, identities and certificates.

api_tokens.py: the API tokens of a running node
certificates.py: the certificates of mutual TLS
cluster_key.py: a node's keys on disk over joins and leaves, and the certificates made of them
keys.py: the cluster key and the node's identity
local_token.py: the token that lets this user's commands and browser in
token_file.py: the API tokens on disk
"""
