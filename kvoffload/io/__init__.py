"""The I/O server, which runs all code of backends, and the engine's client of it."""
