"""Copies that go on where the last one ended, at both ends, are one copy: a run."""

import numpy as np
import pytest
import torch

from kvoffload.messages import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
)
from kvoffload.transfer.cuda.copy_plan import CopyPlan
from kvoffload.transfer.layout import ChunkLayout, ChunkMove

PER_CHUNK = 2
PAGE = 4096
"""Such pages fill a slot without padding: chunks in adjacent slots are adjacent bytes."""


def plan_of(direct_page_bytes):
    entry = CanonicalKVCacheTensor(torch.zeros((8, PAGE), dtype=torch.int8), PAGE)
    caches = CanonicalKVCaches((entry,), ((CanonicalKVCacheRef(0, PAGE),),))
    layout = ChunkLayout(caches, PER_CHUNK)
    plan = CopyPlan(caches, layout, layout.slot_bytes, 1 << 20, direct_page_bytes)
    return plan, torch.zeros(1 << 20, dtype=torch.int8)


def moves(*slots_and_blocks):
    return [ChunkMove(slot, 0, 0, np.array(ids, np.int32)) for slot, *ids in slots_and_blocks]


@pytest.mark.parametrize(
    ("slots", "runs"),
    [
        ([3, 4, 5], [(0, 3, 3)]),
        ([3, 4, 6], [(0, 3, 2), (2, 6, 1)]),
        ([4, 3], [(0, 4, 1), (1, 3, 1)]),
        ([3, 3], [(0, 3, 1), (1, 3, 1)]),
    ],
)
def test_staged_chunks_in_adjacent_slots_are_one_run(slots, runs):
    plan, stage = plan_of(1 << 20)
    (part,) = plan.parts[0]
    made = plan.stage_runs(part, moves(*((slot, 0, 1) for slot in slots)), stage)
    size = PER_CHUNK * PAGE
    assert [(run.at, run.host_at, run.num_bytes) for run in made] == [
        (at * size, slot * size, count * size) for at, slot, count in runs
    ]


def test_direct_pages_are_one_run_only_where_blocks_and_slots_are_adjacent():
    plan, _ = plan_of(1)
    made = plan.page_runs(moves((2, 4, 5), (3, 6, 1), (5, 2, 3)))
    assert [(run.at // PAGE, run.host_at // PAGE, run.num_bytes // PAGE) for run in made] == [
        (4, 4, 3),
        (1, 7, 1),
        (2, 10, 2),
    ]
