"""Layers and models: the protocol, Flax modules as layers, parameters as buffers, the unpipelined reference, the cut."""
