"""Copies for engines whose KV cache is in CPU memory."""
