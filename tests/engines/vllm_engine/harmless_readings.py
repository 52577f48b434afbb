"""Harmless fields that vLLM reads where KV is made, and why their reading changes no byte of it.

Each reason names a place that was read, as ``module:function``. All modules that read a field are
in ``harmless_readings.txt``: a new one fails a test, which prints what to look at and to add.
"""

from tests.engines.reading_places import places_of

PARTS = [
    "model_executor/layers",
    "model_executor/models",
    "model_executor/kernels",
    "model_executor/custom_op.py",
    "model_executor/determinism",
    "model_executor/hw_agnostic",
    "kernels",
    "ir",
    "models",
    "third_party",
    "lora",
    "v1/attention",
    "v1/worker",
    "v1/hisparse",
    "v1/spec_decode",
    "v1/kv_cache_interface.py",
    "v1/kv_cache_layout.py",
    "v1/kv_cache_spec_registry.py",
    "v1/core/kv_cache_utils.py",
    "vllm_flash_attn",
    "_custom_ops.py",
    "_aiter_ops.py",
    "forward_context.py",
]
"""Where vLLM computes KV, and lays it out."""

REASONS = {
    "sizes of buffers and workspaces: v1/worker/gpu_model_runner:__init__, "
    "v1/attention/backends/mla/indexer:__init__": (
        "max_num_batched_tokens max_num_scheduled_tokens max_num_seqs num_gpu_blocks "
        "max_num_encoder_input_tokens"
    ),
    "a fact where the loaded model's code names it: kvoffload's request_length": "max_model_len",
    "how long a decode step is, and sizes: v1/attention/backend:max_decode_query_len; the shape of "
    "recurrent states that follows from it is a fact: layers/mamba/abstract:get_kv_cache_spec": (
        "num_speculative_tokens num_speculative_tokens_per_batch_size"
    ),
    "the layers of this process, by name: layers/attention/attention:__init__": (
        "static_forward_context static_all_moe_layers fast_moe_cold_start"
    ),
    "which rank has an expert, and copies of experts: layers/fused_moe/layer:FusedMoEFactory; what "
    "chooses kernels of quantized experts is in the fact `experts`": (
        "enable_eplb eplb_config enable_expert_parallel expert_placement_strategy "
        "enable_elastic_ep elastic_ep_max_dp_size enable_dbo ubatch_size "
        "dbo_decode_token_threshold dbo_prefill_token_threshold data_parallel_size"
    ),
    "a replica's number, ports and groups: v1/worker/gpu_worker:init_device": (
        "data_parallel_backend data_parallel_external_lb data_parallel_index "
        "data_parallel_master_ip data_parallel_rank data_parallel_rank_local "
        "assigned_physical_gpu_ids disable_custom_all_reduce disable_nccl_for_dp_synchronization "
        "distributed_executor_backend distributed_timeout_seconds enable_fault_tolerance "
        "_api_process_count instance_id CUDA_VISIBLE_DEVICES LOCAL_RANK"
    ),
    "the pooler after the last layer: models/bert:__init__, models/qwen2_rm:__init__; the use of a "
    "model is in the fact `code`": "pooler_config",
    "graphs replay the kernels that run without them: v1/worker/gpu_model_runner:capture_model; "
    "for decode steps models/kimi_k3/nvidia/specialized_decode:unsupported chooses fused kernels": (
        "cudagraph_mode cudagraph_capture_sizes max_cudagraph_capture_size "
        "cudagraph_num_of_warmups cudagraph_specialize_lora cudagraph_mm_encoder "
        "encoder_cudagraph_token_budgets "
        "encoder_cudagraph_max_frames_per_batch encoder_cudagraph_max_vision_items_per_batch "
        "enforce_eager VLLM_USE_BREAKABLE_CUDAGRAPH VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS"
    ),
    "which tokens of a replay are computed again, in or out of a graph; their KV is not written: "
    "models/deepseek_v41/nvidia/model_state:__init__": (
        "cudagraph_decoder_replay decoder_replay_cudagraph_capture_sizes "
        "decoder_replay_trim_threshold"
    ),
    "one operation, compiled or called: model_executor/custom_op:enabled, "
    "v1/worker/worker_base:__init__, kernels/linear/scaled_mm/pytorch:get_output_padding": (
        "mode backend custom_ops enabled_custom_ops disabled_custom_ops splitting_ops "
        "compile_sizes compile_mm_encoder inductor_compile_config ir_enable_torch_wrap "
        "ir_op_priority compilation_time encoder_compilation_time VLLM_USE_AOT_COMPILE"
    ),
    "kernels are compiled or chosen by their speed before the first request: "
    "v1/worker/gpu_worker:_compile_or_warm_up_model, layers/fused_moe/fused_moe:get_moe_configs": (
        "enable_jit_warmup enable_flashinfer_autotune enable_rocm_segmented_attn_autotune "
        "VLLM_TUNED_CONFIG_FOLDER VLLM_CPU_CI_ENV VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN"
    ),
    "sizes of memory: v1/worker/gpu_worker:determine_available_memory": (
        "gpu_memory_utilization kv_cache_memory_bytes num_gpu_blocks_override kv_offloading_size "
        "skip_mm_profiling VLLM_ENABLE_STARTUP_PLAN"
    ),
    "whether blocks are shared; the mode of recurrent states that follows from it is a fact: "
    "models/config:verify_and_update_config": "enable_prefix_caching",
    "how requests are cut into steps, and when: layers/pooler/tokwise/methods:__init__, "
    "models/deepseek_v4/compressor:build asks whether the host knows a length": (
        "enable_chunked_prefill async_scheduling"
    ),
    "which backend fits the size of a block; the chosen one is a fact: "
    "v1/attention/selector:get_attn_backend": "user_specified_block_size VLLM_KV_CACHE_LAYOUT",
    "draft tokens, and which are taken: v1/worker/gpu/spec_decode/rejection_sampler:__init__, "
    "v1/spec_decode/ngram_proposer:__init__; the target computes the KV of those": (
        "draft_sample_method disable_padded_drafter_batch enable_adaptive_verification "
        "fly_entropy_threshold fly_entropy_top_k fly_window_size prompt_lookup_max "
        "prompt_lookup_min rejection_sample_method suffix_decoding_max_cached_requests "
        "suffix_decoding_max_spec_factor suffix_decoding_max_tree_depth "
        "suffix_decoding_min_token_prob synthetic_acceptance_rates use_local_argmax_reduction"
    ),
    "the next token, and what an answer has beside tokens: v1/worker/gpu/model_runner:load_model": (
        "aux_output_config enable_batch_sharded_sampling logits_processors logprobs_mode "
        "reasoning_config return_sampling_mask seed structured_outputs_config use_fp64_gumbel "
        "watermark_config VLLM_COMPUTE_NANS_IN_LOGITS VLLM_RAISE_ON_LOGIT_NANS "
        "VLLM_MAX_BAD_WORDS_TOTAL_TOKENS VLLM_MAX_NUM_BAD_WORDS"
    ),
    "sizes of an adapter's buffers; the smaller ones are padded with zeros: "
    "lora/layers/base_linear:create_lora_weights, lora/punica_wrapper/punica_gpu:__init__": (
        "fully_sharded_loras max_cpu_loras max_lora_cls_labels max_lora_rank max_loras "
        "specialize_active_lora"
    ),
    "prompts come as token ids; models/deepseek_v41/common/engram:__init__ and "
    "models/minicpmv4_7 build tables by the tokenizer, for which there is the fact `token_table`": (
        "tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init"
    ),
    "what clients may send: models/gemma4_mm:validate_num_items, "
    "v1/worker/gpu/model_states/default:__init__; embeddings of a prompt are in its hashes": (
        "allowed_local_media_path enable_prompt_embeds limit_per_prompt served_model_name"
    ),
    "ranks share images or the parts of each: models/vision:is_vit_use_data_parallel": (
        "mm_encoder_tp_mode"
    ),
    "the hash of an image, which is in the block hash: models/qwen3_vl:_get_mm_hashes": (
        "mm_hasher_algorithm"
    ),
    "the file is a fact by its content: layers/attention/mm_encoder_attention:_init_fp8_state": (
        "mm_encoder_fp8_scale_path"
    ),
    "where weights lie and come from: models/deepseek_v41/nvidia/model:__init__, "
    "v1/worker/gpu_worker:load_model, models/transformers/causal:load_weights": (
        "device download_dir hf_token offload_config weight_transfer_config use_tqdm_on_load "
        "enable_sleep_mode enable_cumem_allocator enable_nccl_comm_suspend "
        "sleep_preserve_parameter_names"
    ),
    "how KV travels; what a model refuses: models/step5/nvidia/model:_verify_step5_dsa_kv_transfer_"
    "compatibility, models/kimi_k3/amd/specialized_decode/runtime:unsupported": (
        "kv_buffer_device kv_connector kv_connector_extra_config kv_connector_module_path kv_role"
    ),
    "logs, figures and folders: v1/worker/gpu_worker:annotate_profile, forward_context, "
    "models/registry:_get_cache_dir, v1/core/kv_cache_utils:maybe_convert_block_hash": (
        "observability_config profiler_config VLLM_DEBUG_WORKSPACE VLLM_LOG_BATCHSIZE_INTERVAL "
        "VLLM_CACHE_ROOT CUDA_HOME VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES"
    ),
}

PLACES = places_of(__file__)
