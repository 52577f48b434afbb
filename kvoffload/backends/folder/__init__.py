"""The folder backend: chunks in a directory that many hosts mount."""
