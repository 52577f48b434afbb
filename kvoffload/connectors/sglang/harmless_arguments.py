"""Settings of SGLang that change no byte of a KV cache; every other one is a fact of the namespace.

A reason, and the names that it covers with blanks between them. The order of sums
depends on the size of a batch. What changes it and nothing else is harmless: SGLang shares its
radix cache across it. A test sorts each name of an installed SGLang; an unknown one is a fact. A
variable without a prefix that SGLang does not declare is never a fact, and is not named here.
"""

from kvoffload.connectors.configuration import OF_PRECISION, names

_ARGUMENTS = {
    "the weights are a fact by their content": (
        "model_path revision weight_version download_dir model_checksum delete_ckpt_after_loading "
        "speculative_draft_model_path speculative_draft_model_revision"
    ),
    "how the files of weights are read, not which": (
        "weight_loader_disable_mmap weight_loader_prefetch_checkpoints "
        "weight_loader_prefetch_num_threads weight_loader_drop_cache_after_load "
        "startup_weight_load_mode weight_cache_socket weight_cache_timeout"
    ),
    "where a source of weights listens that is unknown without weights_id": (
        "remote_instance_weight_loader_seed_instance_ip "
        "remote_instance_weight_loader_seed_instance_service_port "
        "remote_instance_weight_loader_send_weights_group_ports "
        "remote_instance_weight_loader_start_seed_via_transfer_engine "
        "engine_info_bootstrap_port"
    ),
    "the model's configuration is a fact after overrides, and has the resolved dtype": (
        "json_model_override_args dtype"
    ),
    "a fact of its own, where the pool's dtype does not tell it": "kv_cache_dtype",
    "the content of the file is a fact": (
        "quantization_param_path speculative_token_map uno_lora_path"
    ),
    "the seed of sampling; that of dummy weights is in their fact": "random_seed",
    "a limit; the model's configuration has it, and is a fact where positions depend on it": (
        "context_length"
    ),
    "ranks and their number are facts of their own, where they decide a page": (
        "tp_size pp_size dp_size attn_cp_size dcp_size nnodes node_rank"
    ),
    "addresses, ports and devices of this start": (
        "host port fastapi_root_path nccl_port dist_timeout dist_init_addr gated_launch_port "
        "base_gpu_id gpu_id_step numa_node grpc_port grpc_mode smg_grpc_mode smg_http_sidecar_port "
        "grpc_worker_threads grpc_response_timeout_secs sidecar sidecar_args use_ray "
        "enable_http_worker_reuseport enable_http2 http2_max_concurrent_streams "
        "http2_initial_connection_window_size ssl_keyfile ssl_certfile ssl_ca_certs "
        "ssl_keyfile_password enable_ssl_refresh api_key admin_api_key load_publish_endpoint "
        "decoupled_spec_bind_endpoint decoupled_spec_connect_endpoints decoupled_spec_rank"
    ),
    "the life of processes": (
        "watchdog_timeout soft_watchdog_timeout sleep_on_idle gc_threshold custom_sigquit_handler "
        "skip_server_warmup warmups pre_warm_nccl"
    ),
    "prompts come as token ids, which are in the page hash": (
        "tokenizer_path tokenizer_mode tokenizer_backend tokenizer_worker_num "
        "detokenizer_worker_num skip_tokenizer_init chat_template trust_request_chat_template "
        "hf_chat_template_name completion_template default_chat_template_kwargs "
        "enable_dynamic_batch_tokenizer dynamic_batch_tokenizer_batch_size "
        "dynamic_batch_tokenizer_batch_timeout enable_tokenizer_batch_encode "
        "disable_tokenizer_batch_decode allow_auto_truncate"
    ),
    "which token comes next; the tokens are in the page hash": (
        "sampling_defaults preferred_sampling_params sampling_backend grammar_backend "
        "constrained_json_whitespace_pattern constrained_json_disable_any_whitespace "
        "constrained_json_max_whitespace_cnt disable_outlines_disk_cache "
        "enable_custom_logit_processor enable_strict_thinking sampling_mask_max_tokens "
        "enable_watermark watermark_config watermark_key watermark_key_b "
        "watermark_context_window watermark_mixing_probability watermark_max_probability "
        "watermark_default_enabled watermark_enforce_all "
        "speculative_accept_threshold_single speculative_accept_threshold_acc "
        "speculative_use_rejection_sampling speculative_use_block_verification "
        "speculative_ngram_min_bfs_breadth speculative_ngram_max_bfs_breadth "
        "speculative_ngram_match_type speculative_ngram_max_trie_depth speculative_ngram_capacity "
        "speculative_ngram_external_corpus_path speculative_ngram_external_sam_budget "
        "speculative_ngram_external_corpus_max_tokens"
    ),
    "a label, and the form of answers": (
        "served_model_name file_storage_path enable_cache_report return_input_ids "
        "return_output_ids reasoning_parser tool_call_parser tool_server asr_max_buffer_seconds "
        "asr_max_concurrent_sessions stream_interval batch_notify_size enable_response_store "
        "stream_response_default_include_usage incremental_streaming_output"
    ),
    "logs, metrics, traces and dumps": (
        "log_level log_level_http log_requests log_requests_level log_requests_format "
        "log_requests_target uvicorn_access_log_exclude_prefixes crash_dump_folder show_time_cost "
        "enable_metrics enable_mfu_metrics enable_metrics_for_all_schedulers "
        "load_snapshot_publish_interval tokenizer_metrics_custom_labels_header "
        "tokenizer_metrics_allowed_custom_labels extra_metric_labels bucket_time_to_first_token "
        "bucket_inter_token_latency bucket_e2e_request_latency prompt_tokens_buckets "
        "generation_tokens_buckets gc_warning_threshold_secs decode_log_interval "
        "enable_request_time_stats_logging kv_events_config enable_forward_pass_metrics "
        "forward_pass_metrics_worker_id forward_pass_metrics_ipc_name enable_trace trace_modules "
        "otlp_traces_endpoint otlp_service_name export_metrics_to_file export_metrics_to_file_dir "
        "stat_loggers enable_layerwise_nvtx_marker debug_tensor_dump_output_folder "
        "expert_distribution_recorder_mode expert_distribution_recorder_buffer_size "
        "expert_balancedness_report_mode prefill_delayer_forward_passes_buckets "
        "prefill_delayer_wait_seconds_buckets spec_trace_dir"
    ),
    "how much memory, and which requests run together; SGLang shares its radix cache across it": (
        "mem_fraction_static max_running_requests max_queued_requests max_total_tokens "
        "chunked_prefill_size prefill_decode_interval prefill_decode_interval_min_bs "
        "enable_dynamic_chunking max_prefill_tokens prefill_max_requests schedule_policy "
        "enable_priority_scheduling disable_priority_preemption default_priority_value "
        "abort_on_priority_when_disabled schedule_low_priority_values_first "
        "priority_scheduling_preemption_threshold retraction_policy schedule_conservativeness "
        "swa_full_tokens_ratio _swa_full_tokens_ratio_explicitly_set swa_prefix_tails "
        "disable_overlap_schedule num_continuous_decode_steps scheduler_recv_interval "
        "enable_mixed_chunk max_mamba_cache_size mamba_full_memory_ratio mamba_max_states_per_path "
        "pp_max_micro_batch_size pp_async_batch_depth load_balance_method enable_prefill_delayer "
        "prefill_delayer_max_delay_passes prefill_delayer_token_usage_low_watermark "
        "prefill_delayer_queue_min_ratio prefill_delayer_max_delay_ms min_free_slots_delay "
        "num_reserved_decode_tokens"
    ),
    "CUDA graphs replay the kernels that run without them": (
        "cuda_graph_config cuda_graph_backend_decode cuda_graph_backend_prefill "
        "cuda_graph_max_bs_decode cuda_graph_max_bs_prefill cuda_graph_max_seq_len_prefill "
        "cuda_graph_bs_decode cuda_graph_bs_prefill cuda_graph_prefill_max_context "
        "disable_prefill_cuda_graph disable_decode_cuda_graph disable_cuda_graph "
        "disable_cuda_graph_padding enable_profile_cuda_graph enable_cudagraph_gc debug_cuda_graph"
    ),
    "what stays in SGLang's own caches, and for how long": (
        "enable_hierarchical_cache hicache_host_memory_mode hicache_ratio hicache_size "
        "hicache_host_memory_fraction hicache_write_policy hicache_storage_backend "
        "hicache_storage_prefetch_policy hicache_storage_backend_extra_config "
        "hicache_storage_prefetch_retry_poll_interval hicache_storage_prefetch_retry_max_attempts "
        "radix_eviction_policy radix_eviction_policy_config _radix_eviction_policy_explicitly_set "
        "strip_thinking_cache enable_streaming_session enable_session_radix_cache"
    ),
    "how pages are copied between the device and host memory": "hicache_io_backend",
    "an adapter's requests have its content in the page hash; base requests ignore adapters, "
    "but for kernels of quantized models, which are a fact": (
        "enable_lora lora_paths max_lora_rank lora_target_modules max_loaded_loras "
        "max_loras_per_batch lora_eviction_policy lora_backend max_lora_chunk_size "
        "experts_shared_outer_loras lora_use_virtual_experts lora_strict_loading "
        "lora_drain_wait_threshold enable_lora_overlap_loading"
    ),
    "which media are accepted, and who reads them; an item's features are in the page hash": (
        "mm_processor_worker_num mm_io_worker_num allowed_media_domains limit_mm_data_per_request "
        "media_url_max_file_size_mb mm_preprocess_cache_size_mb mm_feature_transport "
        "enable_broadcast_mm_inputs_process"
    ),
    "both halves of a disaggregated engine compute one KV cache": (
        "disaggregation_mode disaggregation_bootstrap_port disaggregation_ib_device "
        "disaggregation_transfer_backend disaggregation_decode_polling_interval "
        "disaggregation_decode_extra_slots disaggregation_decode_enable_radix_cache "
        "disaggregation_decode_enable_offload_kvcache disaggregation_decode_retraction_backup "
        "disaggregation_decode_allocation_policy disaggregation_decode_host_receive_threshold "
        "disaggregation_enable_kv_checksum optimistic_prefill_attempts enable_pd_role_switch"
    ),
    "weights that leave the device and return differ by a generation, if they may differ": (
        "enable_memory_saver enable_weights_cpu_backup enable_draft_weights_cpu_backup"
    ),
}

_OF_ADAPTERS = (
    "lora_target_modules lora_backend experts_shared_outer_loras lora_use_virtual_experts "
    "lora_strict_loading"
)

_VARIABLES = {
    "the life of processes, and what listens where": (
        "SGLANG_RUN_ID SGLANG_PORT SGLANG_BACKUP_PORT_BASE SGLANG_TCP_STORE_PORT SGLANG_GRPC_PORT "
        "SGLANG_GRPC_WORKER_THREADS SGLANG_HOST_IP SGLANG_LOCAL_IP_NIC SGLANG_ZMQ_ALLOWED_PEERS "
        "SGLANG_ZMQ_SOURCE_IP SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE SGLANG_DP_RANK "
        "SGLANG_IS_FIRST_RANK_ON_NODE SGLANG_ONE_VISIBLE_DEVICE_PER_PROCESS "
        "SGLANG_RAY_BUNDLE_INDICES SGLANG_BLOCK_NONZERO_RANK_CHILDREN SGLANG_FORCE_SHUTDOWN "
        "SGL_FORCE_SHUTDOWN SGLANG_KILLPG_ON_SCHEDULER_EXCEPTION SGLANG_WARMUP_TIMEOUT "
        "SGLANG_HEALTH_CHECK_TIMEOUT SGLANG_TIMEOUT_KEEP_ALIVE SGLANG_WAIT_PORT_TIMEOUT "
        "SGLANG_UVICORN_WORKER_HEALTHCHECK_TIMEOUT SGLANG_HTTP_SERVER_APP_PATH "
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION SGLANG_DIAG_BYPASS_HEALTH_GENERATE "
        "SGLANG_EXPOSE_OWN_ENV_VARS SGLANG_ENABLE_REQUEST_DECOMPRESSION DISABLE_OPENAPI_DOC "
        "SGLANG_REQUEST_STATE_WAIT_TIMEOUT SGLANG_USE_PICKLE_IPC SGLANG_LOG_PICKLE_IPC_OBJECTS "
        "SGLANG_USE_MESSAGE_QUEUE_BROADCASTER SGLANG_LOAD_SNAPSHOT_USE_ZMQ SGLANG_RUST_SERVER "
        "SGLANG_RUST_BUILD_MODE SGLANG_MAX_BATCH_REQS_PER_HTTP_REQ SGLANG_OLLAMA_CHAT_ROUTE "
        "SGLANG_OLLAMA_GENERATE_ROUTE SGLANG_OLLAMA_ROOT_ROUTE SGLANG_OLLAMA_SHOW_ROUTE "
        "SGLANG_OLLAMA_TAGS_ROUTE SGLANG_WAIT_WEIGHTS_READY_TIMEOUT SGLANG_DETOKENIZER_MAX_STATES "
        "SGLANG_PLUGINS SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK SGLANG_WEIGHT_CACHE_SOCKET_TEMPLATE "
        "SGLANG_WEIGHT_CACHE_READY_TEMPLATE"
    ),
    "which of equal devices and cores are used": (
        "ASCEND_NPU_PHY_ID SGLANG_SET_CPU_AFFINITY SGLANG_NUMA_BIND_V2 SGLANG_AUTO_NUMA_BIND "
        "SGLANG_CRASH_ON_NUMA_BIND_FAILURE SGLANG_CPU_OMP_THREADS_BIND SGLANG_CPU_WORKERS "
        "SGLANG_IO_WORKERS SGLANG_ENCODER_VIDEO_DECODE_NUM_THREADS"
    ),
    "logs, metrics, traces, profiles and dumps": (
        "SGLANG_LOG_GC SGLANG_LOG_FORWARD_ITERS SGLANG_LOG_DECODE_GRAPH_KEY SGLANG_LOG_MS "
        "SGLANG_LOG_REQUEST_EXCEEDED_MS SGLANG_LOG_REQUEST_HEADERS SGLANG_JIT_LOG_LEVEL "
        "SGLANG_LOG_SCHEDULER_STATUS_TARGET SGLANG_LOG_SCHEDULER_STATUS_INTERVAL "
        "SGLANG_LOGGING_CONFIG_PATH SGLANG_LOG_EXPERT_LOCATION_METADATA SGLANG_RECORD_STEP_TIME "
        "SGLANG_PROFILE_WITH_STACK SGLANG_PROFILE_RECORD_SHAPES SGLANG_PROFILE_V2 "
        "SGLANG_PROFILE_BY_STAGE_DECODE_MIN_BS SGLANG_ENABLE_NVTX_SCHEDULER "
        "SGLANG_ENABLE_NVTX_OPERATIONS SGLANG_ENABLE_CUDA_GRAPH_CAPTURE_TRACE "
        "SGLANG_NSYS_PROFILING SGLANG_TORCH_PROFILER_DIR SGLANG_MEM_PROFILE_MAX_ENTRIES "
        "SGLANG_TRACE_ASYNC SGLANG_OTLP_EXPORTER_SCHEDULE_DELAY_MILLIS "
        "SGLANG_OTLP_EXPORTER_MAX_EXPORT_BATCH_SIZE SGLANG_TRACE_ASYNC_FLUSH_THRESHOLD "
        "SGLANG_TRACE_LEVEL SGLANG_ENABLE_METRICS_DEVICE_TIMER SGLANG_ENABLE_METRICS_DP_ATTENTION "
        "SGLANG_CACHE_HIT_RATE_WINDOW_SECONDS SGLANG_TEST_METRICS_FILE SGLANG_CUDA_COREDUMP "
        "SGLANG_CUDA_COREDUMP_DIR SGLANG_PYSPY_DUMP_BEFORE_CRASH "
        "SGLANG_CUDA_COREDUMP_BEFORE_CRASH SGLANG_CUDA_COREDUMP_BEFORE_CRASH_WAIT_SECS "
        "SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR SGLANG_RINGBUFFER_WARNING_INTERVAL "
        "SGLANG_TRITON_SLOW_COMPILE_THRESHOLD_SECS SGLANG_TRITON_LOAD_WARNING_THRESHOLD_GB "
        "SGLANG_DETECT_SLOW_RANK"
    ),
    "folders of compiled kernels; what is compiled in them is keyed by its source": (
        "SGLANG_CACHE_DIR SGLANG_JIT_CACHE_DIR SGLANG_JIT_CACHE_DEBUG SGLANG_JIT_CACHE_KEEP "
        "SGLANG_DG_CACHE_DIR SGLANG_CUTE_AOT_CACHE_DIR SGLANG_JIT_FORCE_RECOMPILE "
        "SGLANG_USE_CUSTOM_TRITON_KERNEL_CACHE SGLANG_JIT_LOG_RESOURCE_USAGE "
        "SGLANG_JIT_DEEPGEMM_PRECOMPILE SGLANG_JIT_DEEPGEMM_FAST_WARMUP "
        "SGLANG_IN_DEEPGEMM_PRECOMPILE_STAGE SGLANG_PP_PARALLEL_DEEPGEMM_WARMUP"
    ),
    "prompts come as token ids, and answers are tokens: both are in the page hash": (
        "SGLANG_PATCH_TOKENIZER SGLANG_BATCH_TOKENIZER_OUTPUTS SGLANG_PARALLEL_PROMPT_ENCODE "
        "SGLANG_PARALLEL_PROMPT_ENCODE_MIN_CHARS SGLANG_DEFAULT_THINKING SGLANG_MAX_THINK_TOKENS "
        "SGLANG_GRAMMAR_POLL_INTERVAL SGLANG_GRAMMAR_MAX_POLL_ITERATIONS "
        "SGLANG_DISABLE_OUTLINES_DISK_CACHE EXA_API_KEY SGLANG_EXA_NUM_RESULTS "
        "SGLANG_EXA_SEARCH_TYPE SGLANG_EXA_INCLUDE_HIGHLIGHTS SGLANG_TOOL_STRICT_LEVEL "
        "SGLANG_FORWARD_UNKNOWN_TOOLS SGLANG_RETURN_ORIGINAL_LOGPROB SGLANG_ENABLE_LOGPROB_CHUNK "
        "SGLANG_LOGPROB_CHUNK_SIZE SGLANG_ENABLE_FAST_INPUT_LOGPROBS "
        "SGLANG_SYNC_TOKEN_IDS_ACROSS_TP SGLANG_FORCE_STREAM_INTERVAL "
        "SGLANG_DISABLE_AITER_GREEDY_SAMPLE"
    ),
    "which requests run together; SGLang shares its radix cache across it": (
        "SGLANG_INIT_NEW_TOKEN_RATIO SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR "
        "SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS SGLANG_RETRACT_DECODE_STEPS "
        "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION SGLANG_MAX_NEW_TOKENS_LIMIT "
        "SGLANG_DYNAMIC_CHUNKING_SMOOTH_FACTOR SGLANG_PREFILL_DELAYER_MAX_DELAY_PASSES "
        "SGLANG_PREFILL_DELAYER_TOKEN_USAGE_LOW_WATERMARK SGLANG_PREFILL_DELAYER_DEBUG_LOG "
        "SGLANG_PREFILL_DELAYER_MAX_PREFILL_BS_WINDOW_SIZE SGLANG_DATA_PARALLEL_BUDGET_INTERVAL "
        "SGLANG_SCHEDULER_RECV_SKIPPER_WEIGHT_DEFAULT SGLANG_SCHEDULER_RECV_SKIPPER_WEIGHT_DECODE "
        "SGLANG_SCHEDULER_RECV_SKIPPER_WEIGHT_TARGET_VERIFY "
        "SGLANG_SCHEDULER_RECV_SKIPPER_WEIGHT_NONE SGLANG_SCHEDULER_MAX_RECV_PER_POLL "
        "SGLANG_SCHEDULER_DECREASE_PREFILL_IDLE SGLANG_EMPTY_CACHE_INTERVAL "
        "SGLANG_REQ_WAITING_TIMEOUT SGLANG_REQ_RUNNING_TIMEOUT "
        "SGLANG_ENABLE_WAITING_PREFIX_REFRESH SGLANG_DISABLE_CONSECUTIVE_PREFILL_OVERLAP "
        "SGLANG_RADIX_FORCE_MISS SGLANG_ROUTING_KEY_POLICY_DEBUG_LOG"
    ),
    "transports and other storages: where bytes lie and how they travel": (
        "SGLANG_HICACHE_HF3FS_CONFIG_PATH SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR "
        "SGLANG_HICACHE_FILE_BACKEND_MAX_SIZE SGLANG_HICACHE_FILE_BACKEND_EVICTION_RATIO "
        "SGLANG_HICACHE_FILE_BACKEND_MIN_FREE_SPACE SGLANG_HICACHE_FILE_BACKEND_METADATA_TTL "
        "SGLANG_HICACHE_FILE_BACKEND_ENABLE_METADATA_CACHE SGLANG_HICACHE_MEMCACHE_CONFIG_PATH "
        "SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR SGLANG_HICACHE_NIXL_USE_DIRECT_IO "
        "SGLANG_HICACHE_NIXL_BACKEND_PLUGIN SGLANG_HICACHE_MOONCAKE_CONFIG_PATH "
        "SGLANG_HICACHE_MOONCAKE_REUSE_TE SGLANG_HICACHE_HOST_REGISTER_CHUNK_GB "
        "SGLANG_HICACHE_HOST_PARALLEL_ALLOC_THREADS SGLANG_HUGEPAGE_SIZE "
        "SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE "
        "MOONCAKE_MASTER MOONCAKE_CLIENT MOONCAKE_LOCAL_HOSTNAME MOONCAKE_TE_META_DATA_SERVER "
        "MOONCAKE_GLOBAL_SEGMENT_SIZE MOONCAKE_PROTOCOL MOONCAKE_DEVICE "
        "MOONCAKE_MASTER_METRICS_PORT MOONCAKE_CHECK_SERVER MOONCAKE_TENANT_ID "
        "MOONCAKE_STANDALONE_STORAGE MOONCAKE_ENABLE_SSD_OFFLOAD "
        "MOONCAKE_OFFLOAD_FILE_STORAGE_PATH SGLANG_DISAGGREGATION_THREAD_POOL_SIZE "
        "SGLANG_DISAGGREGATION_QUEUE_SIZE SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT "
        "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE "
        "SGLANG_DISAGGREGATION_WAITING_TIMEOUT SGLANG_DISAGGREGATION_ENGINE_INIT_TIMEOUT "
        "SGLANG_DISAGGREGATION_ZMQ_SEND_TIMEOUT SGLANG_DISAGGREGATION_ZMQ_MAX_SOCKETS "
        "SGLANG_DISAGGREGATION_NIXL_BACKEND SGLANG_DISAGGREGATION_NIXL_BACKEND_PARAMS "
        "SGLANG_DISAGGREGATION_BOOTSTRAP_ENTRY_CLEANUP_INTERVAL HF_HUB_DISABLE_XET "
        "SGLANG_PREFETCH_BLOCK_SIZE_MB"
    ),
    "how ranks and streams exchange what they have computed; SGLang sets them from its options": (
        "SGLANG_NCCL_SO_PATH"
    ),
}

_READ_ELSEWHERE = {
    "kernels, their precision and the reading of media": (
        "AITER_ENABLE_AOT_GLUON_PA_MQA_LOGITS AITER_FLYDSL_EP_NO_FAKE_EXPERT "
        "AITER_FORCE_A8W4 AITER_SITUV2_A4W4 AITER_SITUV2_A8W4 ASCEND_USE_FA "
        "ASCEND_USE_FIA BIAS_PREP_ONLY CK_MOE CUTE_DSL_ARCH EP_REUSE_NCCL_COMM FA_CLC "
        "FA_DISABLE_2CTA FLASHINFER_CUDA_ARCH_LIST "
        "FLASHINFER_DISABLE_FP4_QUANT_FAST_MATH FLASHINFER_USE_CUDA_NORM "
        "FLASH_ATTENTION_ARCH FLA_CACHE_RESULTS FLA_CI_ENV FLA_COMPILER_MODE "
        "FLA_USE_CUDA_GRAPH FLA_USE_FAST_OPS FMHA_SM100_ALLOW_JIT FRAME_FORMAT "
        "GDN_RECOMPUTE_SUPPRESS_LEVEL MINIMAX_NPU_PREFILL_BSQ MORI_ENABLE_SDMA "
        "ROCM_QUICK_REDUCE_CAST_BF16_TO_FP16 ROCM_QUICK_REDUCE_MAX_SIZE_BYTES_MB "
        "ROCM_QUICK_REDUCE_QUANTIZATION TIMM_FUSED_ATTN "
        "TRTLLM_DISABLE_FP4_QUANT_FAST_MATH VIDEO_MAX_PIXELS XHS_VIDEO_JPEG_QUALITY"
    ),
}

ARGUMENTS = names(_ARGUMENTS)
"""Fields of ``ServerArgs``."""
OF_ADAPTERS = tuple(_OF_ADAPTERS.split())
"""Fields that decide what an adapter computes: part of its name in the page hash."""
VARIABLES = names(_VARIABLES)
"""Environment variables."""
READ_ELSEWHERE = names(_READ_ELSEWHERE) | OF_PRECISION
"""Variables that are facts, and that only the place where SGLang reads them gives away."""
