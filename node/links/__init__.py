"""Measurements: the time of a layer, and the links between nodes.

layer_profiles.py: measured layer times of this node, stored over restarts
measurements.py: this node's measurements, published and used
paths.py: the quickest address of each peer
prober.py: the measurement of links, at join and from time to time
"""
