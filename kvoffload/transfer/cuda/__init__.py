"""Copies for engines whose KV cache is on an NVIDIA GPU."""
