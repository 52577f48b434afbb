"""Eviction policies for comparison: plug-ins, each in a module of its own."""
