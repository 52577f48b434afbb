"""Moves bytes: the slab in host memory, the copiers, and the engine that joins them to tiers."""
