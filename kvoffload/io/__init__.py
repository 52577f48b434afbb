"""The I/O process: all code of backends, in a process or a thread beside the engine's."""
