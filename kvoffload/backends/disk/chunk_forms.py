"""How a chunk lies on disk: a file of its own, or a slot of a segment.

A form keeps chunks; the store indexes, counts and evicts them. Both have the methods of
:class:`Files`, and the drafts those of :class:`FileDraft`. They block, and raise OSError where
nothing else is said.
"""

from kvoffload.backends.disk.files import FileDraft, Files
from kvoffload.backends.disk.slots import SlotDraft, Slots

Draft = FileDraft | SlotDraft
"""A place for one chunk that no reader sees yet."""
Form = Files | Slots
"""Chunks by name, of one root."""
