"""Rigs of this project: crashes, power loss, real servers, simulated devices."""
