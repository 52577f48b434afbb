"""``verify`` names each damage by the reason that an engine's load counts for it."""

import os
import shutil

import pytest
from disk_parts import SIZE, open_disk, write

from kvoffload.backends.disk.inspector import DiskInspector
from kvoffload.backends.encryption import CipherSeal
from kvoffload.backends.header import namespace_digest
from kvoffload.testing.backends import keys_of, slots
from tests.support.file_faults import flip


def replaced(make):
    def replace(path, near, far):
        path.unlink()
        make(path)

    return replace


DAMAGES = {
    "magic": (lambda path, *_: flip(path, 0), "corrupt_magic"),
    "header": (lambda path, *_: flip(path, 300), "corrupt_header"),
    "payload": (lambda path, *_: flip(path, 9000), "corrupt_payload"),
    "cut": (lambda path, *_: os.truncate(path, 5000), "corrupt_size"),
    "cut in its header": (lambda path, *_: os.truncate(path, 100), "corrupt_size"),
    "empty": (lambda path, *_: os.truncate(path, 0), "corrupt_size"),
    "too long": (lambda path, *_: os.truncate(path, 4096 + SIZE + 1), "corrupt_size"),
    "another chunk": (lambda path, near, far: shutil.copy(near, path), "corrupt_key"),
    "of another model": (lambda path, near, far: shutil.copy(far, path), "corrupt_namespace"),
    "a folder": (replaced(os.mkdir), "corrupt_folder"),
    "a pipe": (replaced(os.mkfifo), "corrupt_special"),
    "a link": (replaced(lambda path: path.symlink_to("/etc/hosts")), "corrupt_link"),
}


@pytest.mark.parametrize("seal", [None, CipherSeal([b"0123456789abcdef" * 4])], ids=str)
@pytest.mark.parametrize("name", DAMAGES)
async def test_verify_and_a_load_give_the_same_reason(tmp_path, name, seal):
    damage, reason = DAMAGES[name]
    key, other = keys_of(2)
    elsewhere, backend = open_disk(tmp_path, "another"), open_disk(tmp_path, "own")
    for each in (elsewhere, backend) if seal else ():
        each.encrypt_with(seal)
    assert await write(elsewhere, [key]) == [True]
    assert await write(backend, [key, other]) == [True] * 2
    (far,) = tmp_path.glob(f"{namespace_digest('another').hex()}/??/{key.hex()}")
    (own,) = tmp_path.glob(f"{namespace_digest('own').hex()}/??/{key.hex()}")
    (near,) = tmp_path.glob(f"{namespace_digest('own').hex()}/??/{other.hex()}")
    damage(own, near, far)
    inspector = DiskInspector(str(tmp_path))
    (found,) = [chunk for chunk in inspector.chunks() if chunk.path == str(own)]
    assert inspector.verify(found, memoryview(bytearray(8192)), seal)[0] == reason
    inspector.close()
    assert await backend.read([key], slots(1, SIZE)) == [False]
    assert backend.counters()[reason] == 1
