"""Shares of tenants on disk: a flood evicts its own chunks, in one process and after a restart."""

import asyncio

import pytest
from disk_parts import ON_DISK, SIZE, full, open_disk

from kvoffload.backends.disk.index import name_of
from kvoffload.policies.told_return import ToldReturn
from kvoffload.testing.backends import filled, keys_of

A, B = b"a" * 16, b"b" * 16
SLOTS = 24
FULL = full(SLOTS)


async def write(backend, keys, tenant):
    return await backend.write(keys, filled(keys, SIZE), [tenant] * len(keys) if tenant else ())


async def flood(backend, name="a", batches=12):
    """Store eight chunks at a time, two batches at once, as a tenant's many requests do."""
    for i in range(0, batches, 2):
        some = [keys_of(8, f"{name}{i + j}") for j in range(2)]
        await asyncio.gather(*(write(backend, keys, A) for keys in some))


@pytest.mark.parametrize(
    ("policy", "form"),
    [("lru", "files"), ("arc", "files"), ("handicap", "files"), ("handicap", "segments")],
)
async def test_a_flood_evicts_its_own_chunks_once_it_is_above_its_share(tmp_path, policy, form):
    backend = open_disk(tmp_path, tenant_share=0.5, policy=policy, form=form, **FULL)
    kept = keys_of(SLOTS // 2 - 2, "b")
    assert all(await write(backend, kept, B))
    await flood(backend)
    there = sum(await backend.contains(kept))
    assert there == len(kept)
    assert backend.usage().resident_bytes <= SLOTS * ON_DISK


async def test_without_a_share_or_without_tenants_the_policy_decides_alone(tmp_path):
    for i, (share, tenant) in enumerate(((1.0, B), (0.5, None))):
        root = tmp_path / str(i)
        backend = open_disk(root, tenant_share=share, policy="lru", **FULL)
        kept = keys_of(8, "b")
        assert all(await write(backend, kept, tenant))
        for turn in range(6):
            keys = keys_of(8, f"a{turn}")
            await write(backend, keys, tenant and A)
        assert not any(await backend.contains(kept))
        await backend.close()


async def test_chunks_of_an_earlier_start_count_for_no_tenant_and_are_spared_by_a_flood(tmp_path):
    backend = open_disk(tmp_path, tenant_share=0.5, **FULL)
    kept = keys_of(SLOTS // 2 - 2, "b")
    assert all(await write(backend, kept, B))
    await backend.close()
    backend = open_disk(tmp_path, tenant_share=0.5, **FULL)
    await flood(backend)
    assert sum(await backend.contains(kept)) == len(kept)


async def test_what_leaves_or_is_not_stored_counts_no_longer(tmp_path):
    backend = open_disk(tmp_path, tenant_share=0.5, **FULL)
    keys = keys_of(4)
    assert all(await write(backend, keys, A))
    await backend.remove(keys[:1])
    tenants = backend._store.index._tenants
    assert tenants.of == dict.fromkeys((name_of(0, key) for key in keys[1:]), A)
    too_large = keys_of(1, "large")
    size = 2 * SLOTS * ON_DISK
    assert await backend.write(too_large, filled(too_large, size), [B]) == [False]
    assert set(tenants.of.values()) == {A}


async def test_a_session_that_said_when_it_returns_keeps_its_chunks_in_a_flood(tmp_path):
    backend = open_disk(tmp_path, tenant_share=0.25, policy="lru", **FULL)
    kept = keys_of(4, "session")
    assert all(await write(backend, kept, A))
    backend.expect([ToldReturn(b"session", kept, 5.0, 0)], 0.5)
    await flood(backend)
    assert await backend.contains(kept) == [True] * 4
    assert backend._store.index._tenants.of[name_of(0, kept[0])] == A
