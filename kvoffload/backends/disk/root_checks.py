"""Checks of a root: which user may replace its folders, and whether it is a root at all.

Checksums find accidents. Modes and owners keep other users' bytes out, as with sshd's StrictModes.
The checks cover the root, the folders in it, and every folder above it.
"""

import contextlib
import errno
import functools
import grp
import os
import pwd
import stat
from collections.abc import Iterable, Iterator

from kvoffload.backends.disk.paths import (
    OTHER_STORE,
    QUARANTINE,
    SCRATCH,
    WRITERS,
    is_namespace,
)
from kvoffload.backends.disk.vfs import Vfs
from kvoffload.errors import ConfigError

_MAX_LINKS = 40
"""The kernel's own limit of links in one path."""
LINK = "is a symbolic link; give the folder itself"
_HARMLESS = ("lost+found",)
"""Names in an empty file system."""


def refuse_unsafe(path: str, facts: os.stat_result, *, is_root: bool = True) -> None:
    """Raise ConfigError for a folder that other users could change, and for a link."""
    if stat.S_ISLNK(facts.st_mode):
        raise ConfigError("root", path, LINK)
    if not stat.S_ISDIR(facts.st_mode):
        raise ConfigError("root", path, "is not a folder")
    if facts.st_uid != os.geteuid():
        other = ", or use a folder of your own" if is_root else ""
        raise ConfigError("root", path, _foreign(facts.st_uid) + other)
    if _is_open(facts):
        other = _sub_folder(path, facts) if is_root else ""
        raise ConfigError("root", path, f"is {_writable(path, facts)}{other}")


def refuse_unsafe_inside(vfs: Vfs, root: str) -> None:
    """Raise ConfigError if a folder in the root is a link, or another user could change it."""
    for name in _listed(vfs, root):
        if name in (WRITERS, QUARANTINE) or is_namespace(name):
            with contextlib.suppress(FileNotFoundError):  # removed since the listing
                refuse_unsafe(f"{root}/{name}", vfs.lstat(f"{root}/{name}"), is_root=False)


def refuse_exposed(vfs: Vfs, root: str) -> None:
    """Raise ConfigError if another user could rename the root, or a folder above it.

    Missing folders are skipped. ACLs need no check of their own: the mode bits of the group show
    what an ACL allows.

    Raises:
        OSError: a folder above the root cannot be examined.
    """
    for path, facts in _parents(vfs, os.path.dirname(root)):
        remedy = '; or, where no untrusted process runs, "trust_parent_folders": true'
        if facts.st_uid not in (0, os.geteuid()):
            owner = f"lies below {path}, which belongs to user {facts.st_uid} and not to root or"
            problem = f"{owner} {os.geteuid()}: that user could replace it; use another place"
            raise ConfigError("root", root, problem + remedy)
        sticky = facts.st_mode & stat.S_ISVTX  # users cannot rename files of other users there
        if stat.S_ISDIR(facts.st_mode) and _is_open(facts) and not sticky:
            problem = f"lies below {path}, which is {_writable(path, facts)}"
            raise ConfigError("root", root, problem + remedy)


def enter_safely(vfs: Vfs, root: str, *, trust_parents: bool) -> None:
    """Open a root, check the folder that was opened, and resolve all paths below from it.

    In a folder such as /tmp another user may have replaced the root since an earlier check.

    Raises:
        ConfigError: other users could change the root, or replace it unless parents are trusted.
        OSError: it cannot be opened.
    """
    fd = vfs.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        refuse_unsafe(root, vfs.fstat(fd))
        if not trust_parents:
            refuse_exposed(vfs, root)
    except BaseException:
        vfs.close_quietly(fd)
        raise
    vfs.enter(root, fd)


def _is_open(facts: os.stat_result) -> bool:
    if facts.st_mode & stat.S_IWOTH:
        return True
    return bool(facts.st_mode & stat.S_IWGRP) and not is_private_group(facts.st_gid)


@functools.cache
def is_private_group(gid: int) -> bool:
    """Return whether this process's user is the only member of a group.

    Debian, Ubuntu and Fedora give each user such a group, and folders that the group may write.
    """
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    if gid == 0 or set(group.gr_mem) - {user.pw_name}:
        return False  # containers give group 0 to users without a name
    return user.pw_gid == gid and all(
        other.pw_gid != gid or other.pw_uid == user.pw_uid for other in pwd.getpwall()
    )


def _parents(vfs: Vfs, folder: str) -> Iterator[tuple[str, os.stat_result]]:
    """Yield each folder from ``/`` to this one, and each link followed, with its facts."""
    at, links = "/", 0
    yield at, vfs.lstat(at)
    ahead = folder.split("/")[::-1]
    while ahead:
        name = ahead.pop()
        if name in ("", ".", ".."):
            at = os.path.dirname(at) if name == ".." else at
            continue
        path = os.path.join(at, name)
        try:
            facts = vfs.lstat(path)
        except FileNotFoundError:
            return
        yield path, facts
        if not stat.S_ISLNK(facts.st_mode):
            at = path
            continue
        links += 1
        if links > _MAX_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
        target = os.readlink(path)
        at = "/" if target.startswith("/") else at
        ahead += target.split("/")[::-1]


def _writable(path: str, facts: os.stat_result) -> str:
    by_group, by_all = facts.st_mode & stat.S_IWGRP, facts.st_mode & stat.S_IWOTH
    who = "everyone" if by_all else "its group"
    modes = [mode for mode, given in (("g-w", by_group), ("o-w", by_all)) if given]
    return f"writable by {who}; chmod {','.join(modes)} {path}"


def _sub_folder(path: str, facts: os.stat_result) -> str:
    if not facts.st_mode & stat.S_IWOTH:
        return ""
    remedy = f", or give a sub-folder such as {path}/kv"
    if facts.st_mode & stat.S_ISVTX:
        return remedy
    return f'{remedy} and, where no untrusted process runs, "trust_parent_folders": true'


def check_root(vfs: Vfs, root: str) -> None:
    """Refuse a folder that is no root of the disk backend, or belongs to another user."""
    if WRITERS not in (names := _listed(vfs, root)):
        is_new = "is empty: no engine has used it yet"
        raise ConfigError("root", root, "is no folder of the disk backend" if names else is_new)
    _listed(vfs, f"{root}/{WRITERS}")


def check_fresh_or_root(vfs: Vfs, root: str) -> bool:
    """Return whether a folder is a root already; refuse a folder with other content."""
    names = _listed(vfs, root)
    refuse_other_store(root, names)
    if WRITERS in names:
        check_root(vfs, root)
        return True
    refuse_foreign(root, (n for n in names if n not in _HARMLESS and not n.startswith(SCRATCH)))
    return False


def refuse_foreign(root: str, names: Iterable[str]) -> None:
    """Raise ConfigError if there are names of other files in a root."""
    if foreign := sorted(names):
        some = ", ".join(foreign[:3]) + (", ..." if len(foreign) > 3 else "")
        remedy = f"has other files in it ({some}); a store needs a folder of its own"
        raise ConfigError("root", root, remedy)


def refuse_other_store(root: str, names: Iterable[str]) -> None:
    """Raise ConfigError if the names in a root are those of the folder backend's."""
    if OTHER_STORE in names:
        remedy = "belongs to a folder tier; give the disk tier a folder of its own"
        raise ConfigError("root", root, remedy)


def _listed(vfs: Vfs, root: str) -> list[str]:
    try:
        mode = vfs.lstat(root).st_mode
        if stat.S_ISLNK(mode):
            raise ConfigError("root", root, LINK)
        if not stat.S_ISDIR(mode):
            raise ConfigError("root", root, "is not a folder")
        return vfs.listdir(root)
    except FileNotFoundError:
        command = f"to begin with an empty folder: mkdir -p -m 700 {root}"
        remedy = f"does not exist; {how_to_make(vfs, root, command)}"
        raise ConfigError("root", root, remedy) from None
    except NotADirectoryError:
        raise ConfigError("root", root, "is below something that is no folder") from None
    except PermissionError as error:
        raise denied(vfs, root) or ConfigError("root", root, f"{error.strerror}") from None


def how_to_make(vfs: Vfs, root: str, command: str) -> str:
    """Return the command that makes a missing folder, or what else makes it or is in its way."""
    above = os.path.dirname(os.path.abspath(root))
    while not os.path.isdir(above):
        above = os.path.dirname(above)
    space, user = vfs.statvfs(above), os.geteuid()
    by_effective = os.access in os.supports_effective_ids
    if space.f_flag & os.ST_RDONLY:
        return f"{above} is mounted read-only: mount it for writing, or give another place"
    if not space.f_blocks:
        return f"{above} keeps no files: give another place"
    if not os.access(above, os.W_OK | os.X_OK, effective_ids=by_effective):
        return f"user {user} may not make it: sudo install -d -m 700 -o {user} {root}"
    return command


def denied(vfs: Vfs, path: str) -> ConfigError | None:
    """Return the error for a path of another user, which says whom to run as; else None."""
    while True:
        try:
            owner = vfs.lstat(path).st_uid
        except PermissionError:
            if path == os.path.dirname(path):
                return None
            path = os.path.dirname(path)  # the owner of the folder above denies the look
            continue
        except OSError:
            return None
        if owner == os.geteuid():
            return None
        return ConfigError("root", path, _foreign(owner))


def unusable(vfs: Vfs, root: str, error: OSError) -> ConfigError:
    """Return the error for a root that cannot be opened."""
    refusal = denied(vfs, root) if error.errno in (errno.EACCES, errno.EPERM) else None
    # With its file's name: "remove it" is said of a file in the root, or of a link above.
    return refusal or ConfigError("root", root, f"cannot be used: {error}; {remedy_of(error)}")


def remedy_of(error: OSError) -> str:
    """Return what an operator can do about an error of the mount."""
    return {
        errno.EROFS: "mount it for writing",
        errno.ENOSPC: "make space on it, a few KiB at least",
        errno.EDQUOT: "raise this user's quota there",
        errno.EMFILE: "raise the limit of open files (ulimit -n)",
        errno.EFBIG: "raise the limit of a file's size (ulimit -f)",
        errno.ENOMEM: "the process has no memory left: raise its limit (ulimit -v)",
        errno.ESTALE: "mount it again",
        errno.ENOTCONN: "mount it again",
        errno.EIO: "see whether its device or server is well, then mount it again",
        errno.EISDIR: "remove it",
        errno.ELOOP: "remove it",
        errno.ENXIO: "remove it",
    }.get(error.errno or 0, "see whether it is mounted, and for this user to write")


def _foreign(owner: int) -> str:
    try:
        name = pwd.getpwuid(owner).pw_name
    except KeyError:
        name = f"'#{owner}'"
    return f"belongs to user {owner}, not to {os.geteuid()}; run as that user: sudo -u {name}"
