"""Everything a backend must do, checked by the suite that this class inherits."""

from kvoffload_files import FilesBackend, FilesOptions

from kvoffload.testing import PersistentBackendSuite


class TestFiles(PersistentBackendSuite):
    def open(self, namespace):
        return FilesBackend(FilesOptions(str(self.folder / "kv")), namespace)

    def open_small(self, namespace):
        return FilesBackend(FilesOptions(str(self.folder / "small"), 1 << 20), namespace)

    def damage(self, backend, key):
        """Turn the payload's last byte, as a bad disk would."""
        (path,) = (self.folder / "kv").glob(f"*/{key.hex()}")
        value = path.read_bytes()
        path.write_bytes(value[:-1] + bytes([value[-1] ^ 1]))
