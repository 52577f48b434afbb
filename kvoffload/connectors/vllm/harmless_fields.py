"""Fields and variables of vLLM that change no byte of the KV cache, and why.

Every other field and variable is a fact of the namespace, those of a newer vLLM among them. A value
that changes only how a kernel adds up is harmless: equal prompts differ so far between
two batches of one engine. Names belong to vLLM 0.32 and 0.33.
"""

from kvoffload.connectors.configuration import names

_FIELDS = {
    "a fact of its own: the model, told by its weights' content and its resolved configuration": (
        "quant_config model_config. model model_weights revision hf_config hf_text_config "
        "hf_config_path hf_overrides config_format generation_config override_generation_config "
        "runner convert model_impl load_config. load_format model_loader_extra_config"
    ),
    "a fact of its own: as the worker has resolved it": (
        "device_config lora_config speculative_config cache_config. block_size cache_dtype "
        "kv_cache_layout prefix_caching_hash_algo attention_config. backend backend_per_kind "
        "parallel_config. rank tensor_parallel_size world_size"
    ),
    "a fact of its own where a model reads it: the longest request": (
        "model_config. max_model_len spec_target_max_model_len"
    ),
    "names and credentials": "instance_id model_config. served_model_name hf_token",
    "prompts come as token ids, which are in the hashes": (
        "model_config. tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init "
        "renderer_num_workers"
    ),
    "what clients may send, and how many": (
        "model_config. allowed_local_media_path allowed_media_domains enable_prompt_embeds "
        "model_config.multimodal_config. limit_per_prompt enable_mm_embeds"
    ),
    "the next token is chosen after its KV; random weights have their seed in their name": (
        "structured_outputs_config reasoning_config watermark_config aux_output_config "
        "model_config. seed max_logprobs logprobs_mode return_sampling_mask use_fp64_gumbel "
        "logits_processors pooler_config io_processor_plugin"
    ),
    "media are hashed before; the sizes of caches and buffers on their way": (
        "model_config.multimodal_config. mm_processor_cache_gb mm_processor_cache_type "
        "mm_hasher_algorithm mm_shm_cache_max_object_size_mb mm_tensor_ipc mm_ipc_gpu_memory_gb "
        "skip_mm_profiling mm_encoder_tp_mode mm_encoder_fp8_scale_path"
    ),
    "the same computation, compiled or launched in another way": (
        "optimization_level performance_mode model_config. enforce_eager disable_cascade_attn "
        "compilation_config. mode debug_dump_path cache_dir compile_cache_save_format backend "
        "custom_ops ir_enable_torch_wrap splitting_ops compile_mm_encoder cudagraph_mm_encoder "
        "encoder_cudagraph_token_budgets encoder_cudagraph_max_vision_items_per_batch "
        "encoder_cudagraph_max_frames_per_batch cudagraph_decoder_replay "
        "decoder_replay_cudagraph_capture_sizes decoder_replay_trim_threshold compile_sizes "
        "compile_ranges_endpoints inductor_compile_config cudagraph_mode cudagraph_num_of_warmups "
        "cudagraph_capture_sizes cudagraph_copy_inputs cudagraph_specialize_lora "
        "use_inductor_graph_partition pass_config max_cudagraph_capture_size dynamic_shapes_config "
        "local_cache_dir fast_moe_cold_start kernel_config. ir_op_priority "
        "enable_flashinfer_autotune enable_rocm_segmented_attn_autotune enable_cutedsl_warmup "
        "enable_jit_warmup"
    ),
    "what compiling has noted": (
        "compilation_config. enabled_custom_ops disabled_custom_ops traced_files compilation_time "
        "encoder_compilation_time static_forward_context static_all_moe_layers"
    ),
    "sizes of memory and of caches": (
        "cache_config. gpu_memory_utilization num_gpu_blocks_override num_gpu_blocks "
        "num_cpu_blocks simple_cpu_offload_num_blocks kv_cache_size_tokens "
        "kv_cache_max_concurrency kv_cache_memory_bytes kv_offloading_size kv_offloading_backend "
        "enable_prefix_caching user_specified_block_size _block_size_resolved"
    ),
    "which requests are computed together, and in which order": (
        "scheduler_config. max_num_batched_tokens max_num_scheduled_tokens max_num_seqs "
        "max_num_active_seqs long_prefill_token_threshold long_prefill_token_threshold_adaptive "
        "max_num_queued_reqs max_num_queued_tokens enable_chunked_prefill "
        "max_num_encoder_input_tokens encoder_cache_size policy scheduler_reserve_full_isl "
        "watermark prefill_schedule_interval async_scheduling stream_interval scheduler_cls"
    ),
    "where weights lie and how they are read, not what they are": (
        "offload_config weight_transfer_config load_config. download_dir safetensors_load_strategy "
        "safetensors_prefetch_num_threads safetensors_prefetch_block_size device use_tqdm_on_load "
        "pt_load_map_location model_config. enable_sleep_mode sleep_preserve_parameter_names "
        "sleep_mode_backend sleep_mode_offload_cudagraph enable_nccl_comm_suspend "
        "enable_cumem_allocator"
    ),
    "replicas, and the processes, machines and ports of an engine": (
        "parallel_config. data_parallel_size data_parallel_size_local data_parallel_rank "
        "data_parallel_rank_local data_parallel_index data_parallel_master_ip "
        "data_parallel_rpc_port data_parallel_master_port data_parallel_backend "
        "data_parallel_external_lb data_parallel_hybrid_lb dp_sync_interval "
        "_data_parallel_master_port_list _coord_store_port _api_process_count _api_process_rank "
        "distributed_executor_backend master_addr master_port node_rank nnodes numa_bind "
        "numa_bind_nodes numa_bind_cpus assigned_physical_gpu_ids distributed_timeout_seconds "
        "cpu_distributed_timeout_seconds disable_nccl_for_dp_synchronization "
        "max_parallel_loading_workers ray_workers_use_nsight ray_runtime_env placement_group "
        "enable_elastic_ep elastic_ep_max_dp_size enable_fault_tolerance fault_tolerance_config"
    ),
    "which rank computes an expert, and when; its result is the same": (
        "parallel_config. enable_expert_parallel enable_eplb eplb_config expert_placement_strategy "
        "enable_ep_weight_filter disable_custom_all_reduce enable_shm_tensor_arena enable_dbo "
        "ubatch_size dbo_decode_token_threshold dbo_prefill_token_threshold "
        "enable_batch_sharded_sampling"
    ),
    "ours, and how KV travels to other engines": (
        "kv_events_config ec_manager_config kv_transfer_config. kv_connector engine_id "
        "kv_buffer_device kv_role kv_port kv_connector_extra_config kv_connector_module_path "
        "kv_load_failure_policy ec_transfer_config. engine_id ec_buffer_device ec_buffer_size "
        "ec_ip ec_port ec_role mm_encoder_output_widths"
    ),
    "what is logged, measured and watched": (
        "observability_config logging_config profiler_config watchdog_config shutdown_timeout"
    ),
}

_OF_LORA = {
    "limits of memory and of ranks; an adapter is told by its content in the hashes": (
        "max_lora_rank max_loras max_cpu_loras max_lora_cls_labels specialize_active_lora "
        "fully_sharded_loras"
    ),
}

_OF_SPECULATION = {
    "facts of their own: the draft model": (
        "model revision draft_load_config quantization draft_model_config. model hf_config"
    ),
    "the target's, which has facts of its own": "target_model_config target_parallel_config",
    "which draft tokens are proposed and accepted; the target computes the KV of those": (
        "num_speculative_tokens num_speculative_tokens_per_batch_size rejection_sample_method "
        "synthetic_acceptance_rates synthetic_acceptance_length enable_adaptive_verification "
        "draft_sample_method use_local_argmax_reduction prompt_lookup_max prompt_lookup_min "
        "suffix_decoding_max_tree_depth suffix_decoding_max_cached_requests "
        "suffix_decoding_max_spec_factor suffix_decoding_min_token_prob fly_window_size "
        "fly_entropy_threshold fly_entropy_top_k enforce_eager max_model_len "
        "disable_padded_drafter_batch"
    ),
}

_VARIABLES = {
    "paths on this machine": (
        "CUDA_HOME LD_LIBRARY_PATH VLLM_ASSETS_CACHE VLLM_ASSETS_CACHE_MODEL_CLEAN "
        "VLLM_CACHE_ROOT VLLM_CONFIG_ROOT VLLM_CUDART_SO_PATH VLLM_NCCL_INCLUDE_PATH "
        "VLLM_NCCL_SO_PATH VLLM_XLA_CACHE_PATH VLLM_RPC_BASE_PATH VLLM_MEDIA_CACHE "
        "VLLM_LORA_RESOLVER_CACHE_DIR VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR VLLM_TUNED_CONFIG_FOLDER "
        "VLLM_RUST_FRONTEND_PATH VLLM_DEBUG_DUMP_PATH VLLM_CUDA_COMPATIBILITY_PATH "
        "VLLM_LOGGING_CONFIG_PATH"
    ),
    "credentials, and places that need them": (
        "VLLM_API_KEY S3_ACCESS_KEY_ID S3_SECRET_ACCESS_KEY S3_ENDPOINT_URL"
    ),
    "devices, addresses and ports of a process": (
        "CUDA_VISIBLE_DEVICES LOCAL_RANK VLLM_DP_RANK VLLM_DP_RANK_LOCAL VLLM_DP_SIZE "
        "VLLM_DP_MASTER_IP VLLM_DP_MASTER_PORT VLLM_HOST_IP VLLM_LOOPBACK_IP VLLM_PORT "
        "VLLM_NIXL_SIDE_CHANNEL_HOST VLLM_NIXL_SIDE_CHANNEL_PORT VLLM_EC_SIDE_CHANNEL_HOST "
        "VLLM_EC_SIDE_CHANNEL_PORT VLLM_MOONCAKE_BOOTSTRAP_PORT MOONCAKE_PREFERRED_SEGMENT "
        "MOONCAKE_REQUESTER_LOCAL_HOSTNAME VLLM_P2P_SIDE_CHANNEL_HOST "
        "VLLM_P2P_SIDE_CHANNEL_PORT VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME "
        "VLLM_GPU_NIC_PCIE_MAPPING VLLM_NIC_SELECTION_VARS VLLM_RAY_BUNDLE_INDICES "
        "VLLM_RAY_DP_PACK_STRATEGY VLLM_RAY_DP_PLACEMENT_NODE_IPS "
        "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY "
        "VLLM_RAY_PER_WORKER_GPUS VLLM_PROCESS_NAME_PREFIX VLLM_ELASTIC_EP_SCALE_UP_LAUNCH "
        "VLLM_ELASTIC_EP_DRAIN_REQUESTS"
    ),
    "logs, figures and checks": (
        "FORCE_COLOR NO_COLOR VERBOSE VLLM_CONFIGURE_LOGGING VLLM_LOGGING_COLOR "
        "VLLM_LOGGING_LEVEL VLLM_LOGGING_PREFIX VLLM_LOGGING_STREAM VLLM_LOG_BATCHSIZE_INTERVAL "
        "VLLM_LOG_MODEL_INSPECTION VLLM_LOG_STATS_INTERVAL VLLM_DISABLE_LOG_LOGO "
        "VLLM_DEBUG_LOG_API_SERVER_RESPONSE VLLM_DEBUG_MFU_METRICS VLLM_DEBUG_WORKSPACE "
        "VLLM_GC_DEBUG VLLM_PATTERN_MATCH_DEBUG VLLM_TRACE_FUNCTION VLLM_REQUEST_BODY_LOG_LEVEL "
        "VLLM_CUSTOM_SCOPES_FOR_PROFILING VLLM_NVTX_SCOPES_FOR_PROFILING "
        "VLLM_RINGBUFFER_WARNING_INTERVAL VLLM_GPU_SYNC_CHECK VLLM_COMPUTE_NANS_IN_LOGITS "
        "VLLM_RAISE_ON_LOGIT_NANS VLLM_DO_NOT_TRACK VLLM_NO_USAGE_STATS VLLM_USAGE_SOURCE "
        "VLLM_USAGE_STATS_SERVER VLLM_MOONCAKE_STORE_TIER_LOG"
    ),
    "how a package was built": (
        "CMAKE_BUILD_TYPE MAX_JOBS NVCC_THREADS VLLM_BUILD_COMMIT VLLM_BUILD_PIPELINE "
        "VLLM_BUILD_URL VLLM_IMAGE_TAG VLLM_DOCKER_BUILD_CONTEXT "
        "VLLM_SKIP_PRECOMPILED_VERSION_SUFFIX VLLM_SKIP_VERSION_SUFFIX VLLM_USE_PRECOMPILED "
        "VLLM_USE_PRECOMPILED_RUST VLLM_MAIN_CUDA_VERSION"
    ),
    "the API server: limits, time limits and texts, all before there are token ids": (
        "VLLM_HTTP_MAX_REQUEST_BODY_SIZE VLLM_HTTP_TIMEOUT_KEEP_ALIVE VLLM_AUDIO_FETCH_TIMEOUT "
        "VLLM_IMAGE_FETCH_TIMEOUT VLLM_VIDEO_FETCH_TIMEOUT VLLM_MEDIA_FETCH_MAX_RETRIES "
        "VLLM_MEDIA_CACHE_MAX_SIZE_MB VLLM_MEDIA_CACHE_TTL_HOURS VLLM_MEDIA_LOADING_THREAD_COUNT "
        "VLLM_MEDIA_URL_ALLOW_REDIRECTS VLLM_CHAT_TEMPLATE_FUEL VLLM_CHAT_TEMPLATE_RENDER_TIMEOUT "
        "VLLM_ENABLE_RESPONSES_API_STORE VLLM_ENABLE_COHERE_API VLLM_ENFORCE_STRICT_TOOL_CALLING "
        "VLLM_GPT_OSS_HARMONY_SYSTEM_INSTRUCTIONS VLLM_GPT_OSS_SYSTEM_TOOL_MCP_LABELS "
        "VLLM_SYSTEM_START_DATE VLLM_TOOL_JSON_ERROR_AUTOMATIC_RETRY "
        "VLLM_TOOL_PARSE_REGEX_TIMEOUT_SECONDS VLLM_USE_EXPERIMENTAL_PARSER_CONTEXT "
        "VLLM_SERVER_DEV_MODE VLLM_KEEP_ALIVE_ON_ENGINE_DEATH VLLM_USE_RUST_FRONTEND "
        "VLLM_USE_RUST_BENCH VLLM_USE_FASTOKENS VLLM_DISABLE_REQUEST_ID_RANDOMIZATION "
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING VLLM_ALLOW_INSECURE_SERIALIZATION "
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN VLLM_SKIP_MODEL_NAME_VALIDATION "
        "VLLM_MSGPACK_ZERO_COPY_THRESHOLD VLLM_V1_OUTPUT_PROC_CHUNK_SIZE "
        "VLLM_MAX_COMPLETION_PROMPTS VLLM_MAX_N_SEQUENCES VLLM_MAX_STOP_STRINGS "
        "VLLM_MAX_NUM_BAD_WORDS VLLM_MAX_BAD_WORDS_TOTAL_TOKENS "
        "VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB VLLM_MAX_MEDIA_REQUEST_DECODE_BYTES "
        "VLLM_MAX_MEDIA_REQUEST_DOWNLOAD_SIZE_MB VLLM_MAX_EMBED_DECODE_BYTES "
        "VLLM_MAX_AUDIO_PREPROCESS_WORKERS VLLM_LORA_RESOLVER_HF_REPO_LIST"
    ),
    "the next token is chosen after its KV": (
        "VLLM_USE_FLASHINFER_SAMPLER VLLM_XPU_USE_SAMPLER_KERNEL "
        "VLLM_REGEX_COMPILATION_TIMEOUT_S VLLM_XGRAMMAR_CACHE_MB VLLM_V1_USE_OUTLINES_CACHE "
        "VLLM_BEAM_ALWAYS_CONSTRAIN_OUTPUT"
    ),
    "processes, their time limits, and memory": (
        "VLLM_ENGINE_READY_TIMEOUT_S VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS "
        "VLLM_WORKER_MULTIPROC_METHOD VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS "
        "VLLM_ENABLE_V1_MULTIPROCESSING VLLM_USE_SPINLOOP_EXT VLLM_MQ_MAX_CHUNK_BYTES_MB "
        "VLLM_CPU_OMP_THREADS_BIND VLLM_CPU_NUM_OF_RESERVED_CPU VLLM_CPU_KVCACHE_SPACE "
        "VLLM_CPU_CI_ENV VLLM_WSL2_ENABLE_PIN_MEMORY VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY "
        "VLLM_WEIGHT_OFFLOADING_DISABLE_UVA VLLM_FASTSAFETENSORS_QUEUE_SIZE "
        "VLLM_P2P_HANDSHAKE_TIMEOUT_S VLLM_P2P_IDLE_TIMEOUT_S VLLM_P2P_MAX_PEERS "
        "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT VLLM_MOONCAKE_CONNECTOR_TIMEOUT "
        "VLLM_MOONCAKE_DISK_STAGING_USABLE_RATIO VLLM_MOONCAKE_LOAD_RECV_THREADS "
        "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES VLLM_KV_OFFLOAD_MAX_BATCH_DESCRIPTORS "
        "VLLM_USE_SIMPLE_KV_OFFLOAD VLLM_SKIP_P2P_CHECK VLLM_ROCM_SLEEP_MEM_CHUNK_SIZE"
    ),
    "the same computation, compiled or launched in another way": (
        "VLLM_USE_V2_MODEL_RUNNER VLLM_DISABLE_COMPILE_CACHE VLLM_COMPILE_CACHE_SAVE_FORMAT "
        "VLLM_FORCE_AOT_LOAD VLLM_USE_AOT_COMPILE VLLM_USE_BYTECODE_HOOK "
        "VLLM_USE_MEGA_AOT_ARTIFACT VLLM_USE_STANDALONE_COMPILE VLLM_ENABLE_PREGRAD_PASSES "
        "VLLM_ENABLE_INDUCTOR_COORDINATE_DESCENT_TUNING VLLM_ENABLE_INDUCTOR_MAX_AUTOTUNE "
        "VLLM_ENABLE_CUDAGRAPH_GC VLLM_USE_BREAKABLE_CUDAGRAPH "
        "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS VLLM_DEEP_GEMM_WARMUP "
        "VLLM_TRITON_JIT_WARMUP_NUM_THREADS VLLM_ENABLE_STARTUP_PLAN "
        "VLLM_XLA_CHECK_RECOMPILATION VLLM_USE_LAYERNAME VLLM_ENABLE_CUDA_COMPATIBILITY "
        "VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN"
    ),
    "a fact of its own: as the worker has resolved it": "VLLM_KV_CACHE_LAYOUT",
}

FIELDS = names(_FIELDS)
"""Dotted names of fields of ``VllmConfig``; a configuration that is named goes whole."""
OF_LORA = names(_OF_LORA)
OF_SPECULATION = names(_OF_SPECULATION) | {
    f"draft_{name}" for name in FIELDS if name.startswith(("model_config.", "parallel_config."))
}
VARIABLES = names(_VARIABLES)
