"""What a tier has stored, as an operator finds it: files in a folder, or objects of a bucket."""

from pathlib import Path

from disk_parts import closed_later, in_form

from kvoffload import open_backend
from kvoffload.backends.object.bucket import Bucket
from kvoffload.backends.object.naming import parse_chunk
from kvoffload.backends.object.options import ObjectOptions

_MOST_BYTES = 1 << 24


class StoredFiles:
    """The chunks of a disk tier or of a shared folder, by their paths."""

    def __init__(self, type, folder):
        self.type, self._root = type, Path(folder)
        self.settings = {"root": str(folder), "capacity": "64MiB"}
        self.words = (str(folder),)

    def contents(self):
        return {str(path): path.read_bytes() for path in self._root.glob("*/??/*")}

    def replace(self, name, content):
        Path(name).write_bytes(content)


class StoredObjects:
    """The chunks of a bucket, by their names."""

    type = "object"

    def __init__(self, options):
        self.settings, self._bucket = options, Bucket(ObjectOptions(**options), 30.0)
        given = [f"{name}={value}" for name, value in options.items() if name != "url"]
        self.words = (options["url"], *(word for each in given for word in ("-o", each)))

    def contents(self):
        names = [each.name for each in self._bucket.list() if parse_chunk(each.name)]
        return {name: bytes(self._bucket.fetch(name, _MOST_BYTES)) for name in names}

    def replace(self, name, content):
        self._bucket.put(name, [content], replace=True)


def opened(place, **settings):
    """Open the tier of a place, ready to be used; it is closed after the test."""
    backend = closed_later(open_backend(place.type, {**place.settings, **settings}, "one"))
    assert place.type != "disk" or in_form(backend, "files").wait_ready(60)
    return backend
