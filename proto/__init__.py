"""What processes say to each other, and bounds on its numbers.

bound_server.py: gRPC servers that refuse numbers out of bounds
bounds.py: bounds on every number that another process may send
generate.py: writes the generated code from peer.proto
"""
