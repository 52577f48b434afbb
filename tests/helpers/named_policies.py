"""The policies of the package and of examples/policies, by their names."""

from kvoffload_policies.fifo import FIFOPolicy
from kvoffload_policies.lru2 import LRU2Policy
from kvoffload_policies.s3fifo import S3FIFOPolicy

from kvoffload.policies.arc import ARCPolicy
from kvoffload.policies.handicap import HandicapPolicy
from kvoffload.policies.lru import LRUPolicy

NAMED_POLICIES = {
    "arc": ARCPolicy,
    "handicap": HandicapPolicy,
    "lru": LRUPolicy,
    "fifo": FIFOPolicy,
    "lru2": LRU2Policy,
    "s3fifo": S3FIFOPolicy,
}
