"""Harmless arguments and variables that SGLang reads where KV is made, and why that is harmless.

Each reason names a place that was read, as ``module:function``. All modules that read a name are
in ``harmless_readings.txt``: a new one fails a test, which prints what to look at and to add.
"""

from tests.engines.reading_places import places_of

PARTS = [
    "batch_invariant_ops",
    "batch_overlap",
    "compilation",
    "configs",
    "dllm",
    "eplb",
    "hardware_backend",
    "kernel_plugins",
    "layers",
    "lora",
    "mem_cache/allocator",
    "mem_cache/base_swa_memory_pool.py",
    "mem_cache/deepseek_v4_memory_pool.py",
    "mem_cache/hybrid_cache",
    "mem_cache/kv_cache_builder.py",
    "mem_cache/kv_cache_configurator.py",
    "mem_cache/kv_cache_dtype.py",
    "mem_cache/layout",
    "mem_cache/memory_pool.py",
    "mem_cache/memory_pool_host.py",
    "mem_cache/pool_host",
    "mem_cache/swa_memory_pool.py",
    "mem_cache/unified_memory_pool.py",
    "model_executor",
    "models",
    "speculative",
    "state_capturer",
]
"""Where SGLang computes KV, and lays it out."""

REASONS = {
    "graphs replay the kernels that run without them: model_executor/runner/"
    "decode_cuda_graph_runner:_capture; layers/quantization/fp8_utils:apply_fp8_linear rounds by "
    "one formula, compiled or called; models/gemma4_causal:__init__ refuses a combination": (
        "cuda_graph_bs_decode cuda_graph_config debug_cuda_graph disable_cuda_graph "
        "disable_cuda_graph_padding enable_cudagraph_gc enable_profile_cuda_graph"
    ),
    "sizes of pools and buffers, and which requests run together: mem_cache/kv_cache_configurator:"
    "_profile_available_bytes, layers/attention/trtllm_mha_backend:__init__; layers/attention/"
    "linear/gdn_backend:flashinfer_gdn_prefill_default chooses kernels by their speed": (
        "_swa_full_tokens_ratio_explicitly_set chunked_prefill_size disable_overlap_schedule "
        "disable_priority_preemption enable_dynamic_chunking enable_mixed_chunk "
        "enable_priority_scheduling mamba_full_memory_ratio max_mamba_cache_size "
        "max_prefill_tokens max_running_requests max_total_tokens mem_fraction_static "
        "prefill_max_requests swa_full_tokens_ratio swa_prefix_tails"
    ),
    "which half computes, and buffers of its role: mem_cache/kv_cache_builder:resolve_decode_"
    "retraction_backup, layers/attention/dsa/utils:should_use_dsa_fused_topk; the fused choice of "
    "tokens is the same; the layout that follows is an attribute of the pool, a fact": (
        "disaggregation_decode_enable_offload_kvcache disaggregation_decode_enable_radix_cache "
        "disaggregation_decode_extra_slots disaggregation_decode_host_receive_threshold "
        "disaggregation_decode_retraction_backup disaggregation_mode enable_pd_role_switch"
    ),
    "where weights lie and come from: model_executor/model_runner_components/load_model_utils:"
    "build_load_config, model_executor/model_runner:load_model": (
        "enable_draft_weights_cpu_backup enable_memory_saver enable_weights_cpu_backup "
        "engine_info_bootstrap_port remote_instance_weight_loader_seed_instance_ip "
        "remote_instance_weight_loader_seed_instance_service_port "
        "remote_instance_weight_loader_send_weights_group_ports "
        "remote_instance_weight_loader_start_seed_via_transfer_engine weight_cache_socket "
        "weight_loader_disable_mmap weight_loader_drop_cache_after_load "
        "weight_loader_prefetch_num_threads MOONCAKE_DEVICE MOONCAKE_PROTOCOL"
    ),
    "kernels are compiled, and kept in folders: layers/deep_gemm_wrapper/compile_utils, "
    "compilation/compiler_interface:initialize_cache": (
        "DG_JIT_CACHE_DIR DG_JIT_USE_NVRTC FLASHINFER_DISABLE_VERSION_CHECK MEGA_USE_NCU "
        "SGLANG_CACHE_DIR SGLANG_DG_CACHE_DIR SGLANG_IN_DEEPGEMM_PRECOMPILE_STAGE "
        "SGLANG_IS_FIRST_RANK_ON_NODE SGLANG_JIT_DEEPGEMM_FAST_WARMUP "
        "SGLANG_JIT_DEEPGEMM_PRECOMPILE SGLANG_PP_PARALLEL_DEEPGEMM_WARMUP "
        "TORCHINDUCTOR_CACHE_DIR TRITON_CACHE_DIR WAVE_DUMP_MLIR"
    ),
    "this process: its devices, ports and plug-ins: model_executor/model_runner:__init__, "
    "model_executor/mindspore_runner:run_scheduler_init; kernel_plugins/amd/binding:"
    "monokernel_disable_reasons compares a time limit": (
        "base_gpu_id dist_init_addr watchdog_timeout CUDA_VISIBLE_DEVICES DEVICE_ID MS_NODE_ID "
        "MS_ROLE MS_SCHED_HOST MS_SCHED_PORT MS_WORKER_NUM NVSHMEM_QP_DEPTH SGLANG_PLUGINS"
    ),
    "prompts come as token ids; layers/engram:from_config makes a table by the tokenizer, which "
    "has the fact `token_table`": "chat_template tokenizer_mode tokenizer_path",
    "an adapter's requests have keys of their own: lora/lora_manager:__init__; where an adapter "
    "chooses kernels of a quantized model, layers/moe/topk:bind_runner_backend, it is a fact": (
        "enable_lora enable_lora_overlap_loading experts_shared_outer_loras lora_backend "
        "lora_eviction_policy lora_paths lora_strict_loading lora_target_modules "
        "lora_use_virtual_experts max_lora_chunk_size max_lora_rank max_loras_per_batch"
    ),
    "the next token, after its KV: layers/sampler:create_sampler, "
    "layers/logprob_processor:__init__, speculative/eagle_utils:eagle_sample, "
    "speculative/ngram_worker:__init__": (
        "enable_watermark random_seed sampling_backend sampling_defaults sampling_mask_max_tokens "
        "speculative_accept_threshold_acc speculative_accept_threshold_single "
        "speculative_ngram_capacity speculative_ngram_external_corpus_max_tokens "
        "speculative_ngram_external_corpus_path speculative_ngram_external_sam_budget "
        "speculative_ngram_match_type speculative_ngram_max_bfs_breadth "
        "speculative_ngram_max_trie_depth speculative_ngram_min_bfs_breadth "
        "speculative_use_block_verification speculative_use_rejection_sampling "
        "watermark_context_window watermark_default_enabled watermark_enforce_all watermark_key "
        "watermark_key_b watermark_max_probability watermark_mixing_probability "
        "SGLANG_DISABLE_AITER_GREEDY_SAMPLE SGLANG_ENABLE_FAST_INPUT_LOGPROBS "
        "SGLANG_ENABLE_LOGPROB_CHUNK SGLANG_LOGPROB_CHUNK_SIZE SGLANG_RETURN_ORIGINAL_LOGPROB "
        "SYNC_TOKEN_IDS_ACROSS_TP"
    ),
    "which media are accepted, and room for them: models/embedding_gemma2:__init__, "
    "mem_cache/kv_cache_configurator:_profile_available_bytes": (
        "limit_mm_data_per_request mm_feature_transport"
    ),
    "logs, traces and dumps: model_executor/model_runner:load_model, eplb/expert_distribution:"
    "init_new; models/mimo_v2:__init__ routes to the same experts in a kernel or before it": (
        "debug_tensor_dump_output_folder enable_layerwise_nvtx_marker "
        "expert_balancedness_report_mode expert_distribution_recorder_buffer_size "
        "expert_distribution_recorder_mode served_model_name show_time_cost "
        "SGLANG_DETECT_SLOW_RANK SGLANG_ENABLE_CUDA_GRAPH_CAPTURE_TRACE "
        "SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR SGLANG_LOG_DECODE_GRAPH_KEY "
        "SGLANG_LOG_EXPERT_LOCATION_METADATA SGLANG_TORCH_PROFILER_DIR TLLM_LOG_LEVEL"
    ),
    "pages in host memory: mem_cache/hybrid_cache/hybrid_pool_assembler:build_kv_host_pool; "
    "mem_cache/kv_cache_configurator:_should_elide_dsa_index_k shows in facts of the pool": (
        "enable_hierarchical_cache enable_session_radix_cache hicache_host_memory_mode "
        "hicache_io_backend hicache_ratio hicache_size hicache_storage_backend "
        "hicache_storage_backend_extra_config hicache_write_policy radix_eviction_policy "
        "radix_eviction_policy_config HSA_USERPTR_FOR_PAGED_MEM "
        "SGLANG_HICACHE_HOST_REGISTER_CHUNK_GB SGLANG_HUGEPAGE_SIZE"
    ),
    "written into the model's configuration, a fact where positions are scaled: configs/"
    "model_config:from_server_args": "context_length",
}

PLACES = places_of(__file__)
