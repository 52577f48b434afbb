"""Whether a folder can be looked at from outside: wrong paths and wrong users are named."""

import errno
import os
import stat

from kvoffload.backends.disk.paths import SCRATCH, WRITERS
from kvoffload.backends.disk.vfs import Vfs
from kvoffload.errors import ConfigError

_HARMLESS = ("lost+found",)
"""What an empty file system has by itself."""


def check_root(vfs: Vfs, root: str) -> None:
    """Refuse what is no root of the disk backend, or one of another user.

    Raises:
        ConfigError: says which of them, and what to do.
    """
    names = names_in(vfs, root)
    if WRITERS in names:
        try:
            vfs.listdir(f"{root}/{WRITERS}")
        except PermissionError as error:
            raise denied(vfs, f"{root}/{WRITERS}") or error from error
        except OSError as error:
            if error.errno not in (errno.ENOTDIR, errno.ELOOP):  # a file, or a link
                raise
            names = [""]
        else:
            return
    remedy = "is no folder of the disk backend" if names else "is empty: no engine has used it yet"
    raise ConfigError("root", root, remedy)


def check_fresh_or_root(vfs: Vfs, root: str) -> bool:
    """Say whether a folder is a root already; refuse one that belongs to something else.

    Raises:
        ConfigError: it is not empty and no root, or cannot be used at all.
    """
    names = names_in(vfs, root)
    if WRITERS in names:
        check_root(vfs, root)
        return True
    foreign = [n for n in names if n not in _HARMLESS and not n.startswith(SCRATCH)]
    if foreign:
        some = ", ".join(sorted(foreign)[:3]) + (", ..." if len(foreign) > 3 else "")
        remedy = f"has other files in it ({some}); a store needs a folder of its own"
        raise ConfigError("root", root, remedy)
    return False


def names_in(vfs: Vfs, root: str) -> list[str]:
    """Names in a folder.

    Raises:
        ConfigError: it does not exist, is no folder, or may not be read.
    """
    try:
        if not stat.S_ISDIR(vfs.lstat(root).st_mode):
            raise ConfigError("root", root, "is not a folder")
        return vfs.listdir(root)
    except FileNotFoundError:
        remedy = f"does not exist; to begin with an empty folder: mkdir -m 700 {root}"
        raise ConfigError("root", root, remedy) from None
    except NotADirectoryError:
        raise ConfigError("root", root, "is below something that is no folder") from None
    except PermissionError as error:
        raise denied(vfs, root) or ConfigError("root", root, f"{error.strerror}") from None


def denied(vfs: Vfs, path: str) -> ConfigError | None:
    """The error for a path of another user, which says whom to run as; None for one's own."""
    while True:
        try:
            owner = vfs.lstat(path).st_uid
        except PermissionError:
            path = os.path.dirname(path)  # whoever owns the folder above does not let us look
            continue
        except OSError:
            return None
        if owner == os.geteuid():
            return None
        remedy = f"belongs to user {owner}, not to {os.geteuid()}; run as that user"
        return ConfigError("root", path, remedy)
