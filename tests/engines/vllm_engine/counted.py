"""What an engine has counted, by one name for each counter."""

from collections import Counter

NAMES = {
    "vllm:kvoffload_transfer_failures": "failed",
    "vllm:kvoffload_lookups": "lookups",
    "vllm:kvoffload_tier_events": "",
    "vllm:kvoffload_corrupt_chunks": "corrupt",
    "vllm:kvoffload_events": "",
}
"""Metric → how the names of its counters begin."""


def events(engine):
    """Return ``failed_missing``, ``disk_evicted``, ``lookups_disk_declined``... of an engine."""
    metrics = engine.ask("counted")
    assert metrics["vllm:kvoffload_host_chunks_busy"] == 0
    named = ((name.split(" "), value) for name, value in metrics.items())
    return Counter(
        {
            "_".join(filter(None, (NAMES[metric], *labels))): value
            for (metric, *labels), value in named
            if metric in NAMES
        }
    )
