"""Eviction policies: which chunk leaves first, in host memory and on disk."""
