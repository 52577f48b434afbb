"""What ``--kv-transfer-config`` has for our connector."""


def transfer_config(extra, **more):
    """Return it with these settings of ours, and with other values of vLLM's own."""
    return {
        "kv_connector": "KVOffloadConnector",
        "kv_connector_module_path": "kvoffload.connectors.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
        **more,
    }
