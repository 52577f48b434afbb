"""Whether other users could replace what lies under a root: modes, owners, folders above it.

The checksums find accidents. What keeps other users' bytes out are the rights of the root, of
the folders in it, and of every folder on the way to it, as with sshd's StrictModes.
"""

import errno
import functools
import grp
import os
import pwd
import stat
from collections.abc import Iterator

from kvoffload.backends.disk.vfs import Vfs
from kvoffload.errors import ConfigError

_MAX_LINKS = 40
"""The kernel's own limit for links on the way to one file."""


def refuse_unsafe(path: str, facts: os.stat_result) -> None:
    """Raise ConfigError for a folder that others could tamper with, or that leads elsewhere."""
    if stat.S_ISLNK(facts.st_mode):
        raise ConfigError("root", path, "is a symbolic link; give the folder itself")
    if not stat.S_ISDIR(facts.st_mode):
        raise ConfigError("root", path, "is not a folder")
    if facts.st_uid != os.geteuid():
        raise ConfigError(
            "root",
            path,
            f"belongs to user {facts.st_uid}, not to {os.geteuid()}; "
            "run as that user, or use a folder of your own",
        )
    if _is_open(facts):
        raise ConfigError("root", path, f"is {_writable(path, facts)}{_sub_folder(path, facts)}")


def refuse_exposed(vfs: Vfs, root: str) -> None:
    """Raise ConfigError if another user could rename the root, or a folder above it.

    Folders that do not exist yet are passed over. ACLs need no look of their own: what they allow
    shows in the bits of the group.

    Raises:
        OSError: a folder above the root cannot be looked at.
    """
    for path, facts in _on_the_way(vfs, os.path.dirname(root)):
        remedy = '; or, where no untrusted process runs, "trust_parent_folders": true'
        if facts.st_uid not in (0, os.geteuid()):
            owner = f"lies below {path}, which belongs to user {facts.st_uid} and not to root or"
            problem = f"{owner} {os.geteuid()}: that user could replace it; use another place"
            raise ConfigError("root", root, problem + remedy)
        sticky = facts.st_mode & stat.S_ISVTX  # there, users rename what is their own alone
        if stat.S_ISDIR(facts.st_mode) and _is_open(facts) and not sticky:
            problem = f"lies below {path}, which is {_writable(path, facts)}"
            raise ConfigError("root", root, problem + remedy)


def _is_open(facts: os.stat_result) -> bool:
    """Whether other users may write a folder."""
    if facts.st_mode & stat.S_IWOTH:
        return True
    return bool(facts.st_mode & stat.S_IWGRP) and not is_private_group(facts.st_gid)


@functools.cache
def is_private_group(gid: int) -> bool:
    """Whether this process's user is alone in a group.

    Debian, Ubuntu and Fedora give each user such a group, and folders that the group may write.
    """
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    if gid == 0 or set(group.gr_mem) - {user.pw_name}:
        return False  # 0: containers give it to users without a name
    return user.pw_gid == gid and all(
        other.pw_gid != gid or other.pw_uid == user.pw_uid for other in pwd.getpwall()
    )


def _on_the_way(vfs: Vfs, folder: str) -> Iterator[tuple[str, os.stat_result]]:
    """Every folder from ``/`` to this one, and every link followed, with its facts."""
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
