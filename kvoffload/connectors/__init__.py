"""Translations between an engine's hooks and the offloading verbs.

They are `local`, for engines of one's own, and a folder for each other engine.
"""
