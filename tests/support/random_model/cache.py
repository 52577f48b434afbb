"""The KV cache of the model's engine: its groups, its memory, and what each block must hold."""

import hashlib
from dataclasses import dataclass

import torch

from kvoffload.core.interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from kvoffload.messages import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor

UNIT = 4
"""Tokens that a hash stands for."""
PERIOD = 32
"""Bytes after which the content of a page repeats itself."""


def _spec(kind, block, **more):
    return kind(block_size=block, num_kv_heads=1, head_size=16, dtype=torch.int8, **more)


@dataclass(frozen=True)
class Kind:
    """KV cache groups: for each its format, and the bytes of its pages in its tensors."""

    groups: tuple
    pages: tuple
    has_config: bool = True

    @property
    def alignment(self):
        return max(spec.block_size for spec in self.groups)

    @property
    def keeps_prefixes(self):
        return len(self.groups) == 1 and not hasattr(self.groups[0], "sliding_window")


FULL = _spec(FullAttentionSpec, UNIT)
DOUBLE = _spec(FullAttentionSpec, 2 * UNIT)
KINDS = {
    "one group": Kind((FULL,), ((192, 64),), has_config=False),
    "two groups": Kind((FULL, FULL), ((256,), (256,))),
    "two sizes": Kind((FULL, FULL), ((256,), (6000, 500))),
    "two block sizes": Kind((FULL, DOUBLE), ((256,), (512,))),
    "window": Kind((FULL, _spec(SlidingWindowSpec, UNIT, sliding_window=18)), ((256,), (256,))),
    "window of another size": Kind(
        (FULL, _spec(SlidingWindowSpec, UNIT, sliding_window=11)), ((256,), (5000,))
    ),
    # Chunks of whole pages of memory: a disk moves neighbours by one call.
    "whole pages": Kind((FULL,), ((4096,),), has_config=False),
    "whole pages of two sizes": Kind((FULL, FULL), ((4096,), (8192, 4096))),
    "slots and files": Kind((FULL, FULL), ((4096,), (65536, 8192))),
    # Chunks of 1 MiB, which have slots, and longer ones, which have files.
    "about 1 MiB": Kind((FULL, FULL), ((1 << 18,), (1 << 18, 4096))),
}


class Memory:
    """The engine's memory, and which content each of its blocks must have."""

    def __init__(self, kind, num_blocks):
        self.kind = kind
        self.num_blocks = num_blocks
        self.tensors = [
            [torch.zeros((num_blocks, page), dtype=torch.int8) for page in pages]
            for pages in kind.pages
        ]
        flat, refs = [], []
        for of_group in self.tensors:
            refs.append(tuple(CanonicalKVCacheRef(len(flat) + i, t.shape[1])
                              for i, t in enumerate(of_group)))  # fmt: skip
            flat += [CanonicalKVCacheTensor(each, each.shape[1]) for each in of_group]
        self.caches = CanonicalKVCaches(tuple(flat), tuple(refs))

    @property
    def config(self):
        if not self.kind.has_config:
            return None
        groups = [KVCacheGroupSpec((f"layer{i}",), spec) for i, spec in enumerate(self.kind.groups)]
        return KVCacheConfig(self.num_blocks, [], groups)

    def _content(self, group, tensor, name):
        """What can only be computed from a prefix of one generation: ``name`` is both."""
        page = self.kind.pages[group][tensor]
        seed = hashlib.blake2b(f"{group} {tensor}".encode() + name, digest_size=PERIOD).digest()
        return torch.frombuffer(bytearray(seed * (page // PERIOD + 1)), dtype=torch.int8)[:page]

    def write(self, group, block, name):
        for i, tensor in enumerate(self.tensors[group]):
            tensor[block] = self._content(group, i, name)

    def scribble(self, group, block):
        """Write what no one may take for KV."""
        for tensor in self.tensors[group]:
            tensor[block] = 99

    def holds(self, group, block, name):
        return all(
            torch.equal(tensor[block], self._content(group, i, name))
            for i, tensor in enumerate(self.tensors[group])
        )

    def beginnings(self, names):
        """Return what each block of these names begins with in its first tensor."""
        contents = (self._content(group, 0, name) for (group, _), name in names.items())
        return [content.numpy().tobytes()[:PERIOD] for content in contents]

    def snapshot(self):
        return [tensor.clone() for of_group in self.tensors for tensor in of_group]
