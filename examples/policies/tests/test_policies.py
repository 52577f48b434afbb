"""Each policy passes the suite of plug-in authors."""

from kvoffload_policies.fifo import FIFOPolicy
from kvoffload_policies.lru2 import LRU2Policy
from kvoffload_policies.s3fifo import S3FIFOPolicy

from kvoffload.testing import PolicySuite


class TestFIFO(PolicySuite):
    make = FIFOPolicy


class TestLRU2(PolicySuite):
    make = LRU2Policy


class TestS3FIFO(PolicySuite):
    make = S3FIFOPolicy
