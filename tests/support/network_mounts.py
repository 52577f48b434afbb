"""Network file systems that tests mount twice: what mounts each, and what it needs."""

from tests.support import gluster_mounts, sshfs_mounts

KINDS = {
    "sshfs": (sshfs_mounts.sshfs_mounts, sshfs_mounts.MISSING),
    "glusterfs": (gluster_mounts.gluster_mounts, gluster_mounts.MISSING),
}
"""Each yields two paths of a folder and the server's processes, or None if it cannot be had."""
