"""What is measured and told: seconds a layer, and links between nodes.

layer_profiles.py: measured layer times of this node, kept over restarts
measurements.py: what is measured here, published, and used
paths.py: the quickest address of each peer
prober.py: when links are measured
"""
