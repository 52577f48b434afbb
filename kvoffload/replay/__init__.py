"""Eviction policies against request traces: which policy, how much memory, what hit rate."""
