"""A random model of the whole: an engine, its connector, tiers, and all that can go wrong."""
