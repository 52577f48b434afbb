"""Which of vLLM's own tests of its offloading connector apply to our halves, and which do not."""

RUN = ("test_scheduler.py", "test_worker.py")
"""Files of vLLM's folder ``offloading_connector`` that run with our halves."""

_SUBMITS = "our worker submits host slots to the transfer engine, not mocked specs to a mock"
NOT_OURS = {
    "test_canonical_mapping.py": "of functions of vLLM that the connector does not replace",
    "test_config.py": "of functions of vLLM that the connector does not replace",
    "test_events.py": "of vLLM's tracker of events, which the connector uses as it is",
    "test_metrics.py": "of vLLM's statistics, which the connector uses as they are",
    "test_worker_metadata.py": "of the base class of our report, which adds to it",
    "test_worker.py::test_prepare_store_kv_non_writer_marks_completed_without_submit": _SUBMITS,
    "test_worker.py::test_prepare_store_kv_writer_submits_store": _SUBMITS,
    "test_worker.py::test_prepare_store_kv_non_replicated_rank_gt_zero_queues_store": _SUBMITS,
    "test_worker.py::test_handle_preemptions_non_writer_acks_flushed_store": _SUBMITS,
    "test_worker.py::test_start_kv_transfers_non_writer_still_submits_load": _SUBMITS,
    "test_worker.py::test_load_completion": _SUBMITS,
}
"""Files and tests of vLLM that do not apply to our halves, with the reason."""
