"""Moves bytes: the pinned slab, copiers, one asyncio thread, and the handlers that join them."""
