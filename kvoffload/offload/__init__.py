"""Decides which chunk lives where, what moves and what is evicted: one thread, no I/O, no torch."""
