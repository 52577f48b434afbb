"""The operators' commands on a root: examined from outside, without opening a backend on it."""

from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Any, TypeVar

from kvoffload.backends.admin import Finding
from kvoffload.backends.disk.admin import DiskAdmin
from kvoffload.backends.disk.inspector import DiskInspector
from kvoffload.backends.folder.doctor import OTHER_MOUNT, diagnose
from kvoffload.backends.folder.inspection import FolderInspector
from kvoffload.backends.folder.options import FolderOptions
from kvoffload.backends.folder.seal import read_secret
from kvoffload.backends.key_files import ENCRYPTION, read_encryption, without
from kvoffload.backends.secret_files import refuse_with_encryption
from kvoffload.config import convert

T = TypeVar("T")


class FolderAdmin(DiskAdmin):
    """A root, examined by an operator. Only ``collect`` and a repair change what is stored.

    Args:
        options: those of the backend, ``encryption``, and for ``doctor`` ``other_mount``: the root
            as another mount of the same folder shows it.

    Raises:
        ConfigError: an option is wrong; nothing was touched.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        given = dict(options)
        self._other_mount = str(given.pop(OTHER_MOUNT, ""))
        self._options: FolderOptions = convert(without(given), FolderOptions)
        self._signature = read_secret(self._options.secret_file)
        self._encryption = {name: given[name] for name in given if name == ENCRYPTION}
        if (cipher := read_encryption(given)) is not None:
            refuse_with_encryption(self._options.secret_file)
        self._cipher = cipher

    async def diagnose(self) -> list[Finding]:
        return await diagnose(self._options, self._other_mount, self._encryption)

    def _work(self, work: Callable[[DiskInspector], T]) -> T:
        with closing(FolderInspector(self._options.root, self._signature)) as found:
            return work(found)
