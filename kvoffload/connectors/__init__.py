"""Translations between an engine's hooks and the offloading verbs.

They are `local.py`, and a folder for each other engine.
"""
