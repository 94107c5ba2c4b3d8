"""Messages between nodes and runners, generated from `peer.proto`."""
