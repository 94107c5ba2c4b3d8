"""gRPC between nodes.

channels.py: gRPC channels, and what a failed call means
control_client.py: calls to other nodes
control_server.py: serves other nodes
link_rpc.py: measures a link
model_files.py: serves and reads the files of models
"""
