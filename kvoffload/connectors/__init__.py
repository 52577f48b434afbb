"""Translations between an engine's hooks and the offloading verbs: one module an engine."""
