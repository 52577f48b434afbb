"""Opens a root: a folder that belongs to this user on every host, and that is marked."""

import errno
import logging
import os
import secrets

from kvoffload.backends.disk import paths as disk_paths
from kvoffload.backends.disk.paths import SCRATCH, is_namespace
from kvoffload.backends.disk.root_checks import (
    refuse_exposed,
    refuse_foreign,
    refuse_unsafe,
    unusable,
)
from kvoffload.backends.disk.vfs import Vfs
from kvoffload.backends.folder.places import HOSTS, LEASE, LEFTOVERS, STORE
from kvoffload.backends.folder.records import Records, StoreRecord
from kvoffload.errors import ConfigError

log = logging.getLogger(__name__)

_HARMLESS = ("lost+found", ".snapshot")
"""Names in an empty file system, and in each folder of some servers."""


class Root:
    """A root as one process found it.

    Args:
        vfs: makes the system calls.
        path: of the folder; made if only the folder itself is missing.
        records: of this root.
        trust_parents: whether other users may write folders above it.

    Raises:
        ConfigError: it cannot be used, and why.
    """

    def __init__(self, vfs: Vfs, path: str, records: Records, *, trust_parents: bool) -> None:
        self._vfs = vfs
        self.path = path
        self._records = records
        self.is_new = False
        """Whether it held no chunk when it was opened."""
        try:
            if not trust_parents:
                refuse_exposed(vfs, path)
            try:
                vfs.make_folder(path)
            except FileNotFoundError:
                remedy = f"lies in {os.path.dirname(path)}, which does not exist: is it mounted?"
                raise ConfigError("root", path, remedy) from None
            facts = vfs.lstat(path)
            refuse_unsafe(path, facts)
            self._device = facts.st_dev
            check_content(vfs, path)
            self.is_new = not any(map(is_namespace, vfs.listdir(path)))
            self.store = records.store() or self._marked()
            """The mark of the root."""
            vfs.make_folder(f"{path}/{HOSTS}")
        except OSError as error:
            raise unusable(vfs, path, error) from error

    def look_again(self) -> bool:
        """Return whether this is another store than before; raise OSError if it is not there.

        A root that was emptied is marked again. If its mount is gone, it stays as it is.
        """
        found = self._records.store()
        if found is None:
            vfs, path = self._vfs, self.path
            if vfs.lstat(os.path.dirname(path)).st_dev == self._device:
                vfs.make_folder(path)
            if vfs.lstat(path).st_dev != self._device:
                raise FileNotFoundError(errno.ENOENT, "its file system is not mounted", path)
            found = self._marked()
            vfs.make_folder(f"{path}/{HOSTS}")
        is_other, self.store = found != self.store, found
        return is_other

    def _marked(self) -> StoreRecord:
        store = StoreRecord(store=secrets.token_hex(16))
        self._records.mark(store)
        return store


def check_content(vfs: Vfs, path: str) -> bool:
    """Return whether a folder is a root; raise ConfigError if it has something else in it."""
    names = vfs.listdir(path)
    if disk_paths.WRITERS in names:
        raise ConfigError("root", path, "belongs to a disk tier; a store needs a folder of its own")
    if STORE in names:
        return True
    ours = {HOSTS, LEASE, *_HARMLESS}
    foreign = [n for n in names if n not in ours and not n.startswith((*LEFTOVERS, SCRATCH))]
    refuse_foreign(path, (name for name in foreign if not is_namespace(name)))
    return False
