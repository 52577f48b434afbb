"""What the connector leans on in vLLM's insides, in each version's Python sources.

The sources of a version that is not installed are downloaded when the tests run.
"""

import ast
import re
from pathlib import Path

import pytest

pytest.importorskip("vllm.version", reason="vLLM is not installed; see make test-vllm")

pytestmark = pytest.mark.timeout(600)

VERSIONS = ("installed", "0.33.0")
"""Sources to check against: 0.33 is published for CUDA only, and is not installed."""


@pytest.fixture(params=VERSIONS)
def tree(request):
    """The folder of a version's package ``vllm``."""
    if request.param == "installed":
        import vllm

        return Path(vllm.__file__).parent
    return request.getfixturevalue("vllm_sources")(request.param, "vllm") / "vllm"


def _definitions(tree, module):
    """Return what a module of vLLM defines or imports, classes with their methods' parameters."""
    path = tree.joinpath(*module.split(".")[1:])
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    found = {each.stem: {} for each in path.glob("*.py")} if path.is_dir() else {}
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ClassDef):
            found[node.name] = {
                item.name: [a.arg for a in (*item.args.args, *item.args.kwonlyargs)]
                for item in node.body
                if isinstance(item, ast.FunctionDef)
            }
        elif isinstance(node, ast.FunctionDef):
            found.setdefault(node.name, {})
        elif isinstance(node, ast.Assign):
            found.update((target.id, {}) for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = {}
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found.update((alias.asname or alias.name, {}) for alias in node.names)
    return found


def _our_modules():
    import kvoffload.connectors.vllm as package

    return sorted(Path(package.__file__).parent.glob("*.py"))


def test_every_name_we_import_from_vllm_is_there(tree):
    missing = []
    for file in _our_modules():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm."):
                names = _definitions(tree, node.module)
                missing += [
                    f"{file.name}: {node.module}.{alias.name}"
                    for alias in node.names
                    if alias.name not in names
                ]
    assert not missing


OFFLOADING = "vllm.distributed.kv_transfer.kv_connector.v1.offloading"


@pytest.mark.parametrize(
    ("module", "theirs", "methods"),
    [
        (
            f"{OFFLOADING}.scheduler",
            "OffloadingConnectorScheduler",
            {
                "__init__": ["self", "spec", "vllm_config", "kv_cache_config"],
                "get_num_new_matched_tokens": ["self", "request", "num_computed_tokens"],
                "_maximal_prefix_lookup": [
                    "self", "keys", "req_context", "req", "group_config", "start_chunk_idx",
                ],
                "build_connector_meta": ["self", "scheduler_output"],
                "has_pending_push_work": ["self"],
                "update_connector_output": ["self", "connector_output"],
                "_maybe_observe_lookup_async_delay": ["self", "req_status"],
                "reset_cache": ["self"],
                "shutdown": ["self"],
            },
        ),
        (
            f"{OFFLOADING}.worker",
            "OffloadingConnectorWorker",
            {
                "__init__": ["self", "spec", "vllm_config", "kv_cache_config"],
                "_init_worker": ["self", "kv_caches"],
                "register_kv_caches": ["self", "kv_caches"],
                "handle_preemptions": ["self", "kv_connector_metadata"],
                "start_kv_transfers": ["self", "metadata"],
                "prepare_store_kv": ["self", "metadata"],
                "get_finished": ["self", "finished_req_ids"],
                "build_connector_worker_meta": ["self"],
                "shutdown": ["self"],
            },
        ),
        (
            OFFLOADING + ".events",
            "OffloadingEventsTracker",
            {
                "record_store": ["self", "req", "group_config", "chunk_idx", "offload_key"],
                "record_lookup": ["self", "req", "group_config", "chunk_idx", "offload_key"],
                "record_partial_store": [
                    "self", "req", "group_config", "boundary_tokens", "offload_key"
                ],
                "record_partial_lookup": [
                    "self", "req", "group_config", "boundary_tokens", "offload_key"
                ],
                "take_events": ["self", "events"],
                "reset": ["self"],
            },
        ),
        (
            "vllm.distributed.kv_transfer.kv_connector.v1.base",
            "KVConnectorBase_V1",
            {
                "get_transfer_results": ["self", "finished_req_ids"],
                "get_block_ids_with_load_errors": ["self"],
                "requires_piecewise_for_cudagraph": ["cls", "extra_config"],
            },
        ),
        (
            # Wrapped: see start.py.
            "vllm.distributed.kv_transfer.kv_connector.factory",
            "KVConnectorFactory",
            {"get_connector_class": ["cls", "kv_transfer_config"]},
        ),
        (
            # Wrapped: see engine_weights.py.
            "vllm.v1.engine.core",
            "EngineCore",
            {
                "collective_rpc": ["self", "method", "timeout", "args", "kwargs"],
                "add_lora": ["self", "lora_request"],
                "remove_lora": ["self", "lora_id"],
            },
        ),
        (
            "vllm.v1.core.sched.scheduler",
            "Scheduler",
            {"reset_prefix_cache": ["self", "reset_running_requests", "reset_connector"]},
        ),
        (
            "vllm.v1.kv_offload.base",
            "OffloadingManager",
            {
                "lookup": ["self", "key", "req_context"],
                "prepare_load": ["self", "keys", "req_context"],
                "prepare_store": ["self", "keys", "req_context"],
                "complete_load": ["self", "keys", "req_context"],
                "complete_store": ["self", "keys", "req_context", "success"],
                "on_new_request": ["self", "req_context"],
                "on_request_finished": ["self", "req_context"],
                "reset_cache": ["self"],
                "take_events": ["self"],
                "get_stats": ["self"],
            },
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and "." not in value else "",
)  # fmt: skip
def test_the_methods_we_override_are_called_as_we_expect(tree, module, theirs, methods):
    found = _definitions(tree, module)[theirs]
    for name, parameters in methods.items():
        assert found[name][: len(parameters)] == parameters, name


def test_adapters_are_hashed_where_we_add_their_content(tree):
    hashing = tree / "v1" / "core" / "kv_cache_utils.py"
    assert "_gen_lora_extra_hash_keys" in _definitions(tree, "vllm.v1.core.kv_cache_utils")
    assert hashing.read_text().count("_gen_lora_extra_hash_keys(request)") == 1


def test_the_state_we_read_of_vllms_scheduler_half_is_there(tree):
    text = tree.joinpath(*OFFLOADING.split(".")[1:], "scheduler.py").read_text()
    for attribute in (
        "self._req_status",
        "self._events_tracker",
        "deferred_lookup_start_time",
        "finished_signaled",
        "transfer_jobs",
        "self._current_batch_load_jobs",
        "num_locally_computed_tokens",
        "group_states",
        "group_state.block_ids",
        "next_stored_chunk_idx",
        "offload_keys",
        "load_window_size_in_chunks",
        "sliding_window_size_in_chunks",
    ):
        assert attribute in text
    worker = tree.joinpath(*OFFLOADING.split(".")[1:], "worker.py").read_text()
    assert "self._unsubmitted_store_jobs" in worker


def test_the_http_request_of_the_documentation_resets_the_connector(tree):
    documented = (Path(__file__).parents[3] / "docs/guides/vllm.md").read_text()
    (asked,) = re.findall(r"/reset_prefix_cache\?(\w+)=true", documented)
    router = ast.parse((tree / "entrypoints/serve/dev/cache/api_router.py").read_text())
    (handler,) = (node for node in router.body if getattr(node, "name", "") == "reset_prefix_cache")
    # What it does not know is passed over: only GPU memory would forget.
    assert asked in [argument.arg for argument in handler.args.args]
