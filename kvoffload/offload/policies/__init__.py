"""Eviction policies: one algorithm a file, the same classes for host slots and disk files."""
