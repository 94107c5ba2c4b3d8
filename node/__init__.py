"""The node process: discovery, membership, trust, planning, supervision and HTTP."""
