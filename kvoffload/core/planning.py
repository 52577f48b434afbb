"""From formats and a memory budget to a plan. Pure functions; nothing is allocated here.

A model's layers are sorted into *groups* that share a block table:

* all layers need the same token slots (one kind, one window): one group, each layer its own tensor;
* several kinds: groups of equal length and one page size. The i-th layers of all groups share one
  tensor, because a block belongs to one group at a time. A model of 10 full and 20 sliding-window
  layers becomes 3 groups of 10 layers on 10 tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace

from kvoffload.core.interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    MambaSpec,
    MLAAttentionSpec,
    ModelLimits,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    cdiv,
)
from kvoffload.errors import InsufficientMemoryError, KVCacheSpecError

NULL_BLOCKS = 1
"""Block 0 stands for "no block" in block tables; it takes memory but is never given out."""

Specs = Mapping[str, KVCacheSpec]
"""Layer name → format, in layer order."""


# -- groups --------------------------------------------------------------------------------------


def create_kv_cache_group_specs(
    kv_cache_spec: Specs, grouped_layer_names: Sequence[Sequence[str]]
) -> list[KVCacheGroupSpec]:
    """Make a group of each list of layers; their formats must merge.

    Raises:
        KVCacheSpecError: layers of a group differ in format.
    """
    groups = []
    for layer_names in grouped_layer_names:
        specs = [kv_cache_spec[name] for name in layer_names]
        groups.append(KVCacheGroupSpec(layer_names, type(specs[0]).merge(specs)))
    return groups


def is_kv_cache_type_uniform(kv_cache_spec: Specs) -> bool:
    """Whether all layers have formats that merge into one."""
    return _mergeable(list(kv_cache_spec.values()))


def get_kv_cache_groups(kv_cache_spec: Specs) -> list[KVCacheGroupSpec]:
    """Decide which layers share a block table. Encoder-only layers keep nothing: left out.

    Raises:
        KVCacheSpecError: no layer keeps anything, or formats that cannot be served together.
    """
    kept = {
        name: spec
        for name, spec in kv_cache_spec.items()
        if not isinstance(spec, EncoderOnlyAttentionSpec)
    }
    if not kept:
        raise KVCacheSpecError("no layer of the model has a KV cache: nothing to plan")
    if is_kv_cache_type_uniform(kept):
        return create_kv_cache_group_specs(kept, [list(kept)])
    uniform = UniformTypeKVCacheSpecs.from_specs(kept)
    if uniform is not None:
        return [KVCacheGroupSpec(tuple(kept), uniform)]
    return _groups_of_equal_pages(unify_page_sizes(kept))


def _groups_of_equal_pages(kv_cache_spec: Specs) -> list[KVCacheGroupSpec]:
    """Split each format's layers into groups of one length, so that tensors can be shared.

    The length is the fewest layers any format has, unless longer groups waste less. With 20 full
    and 21 window layers, one group each (1 page in 42 unused) beats 20-layer groups (19 in 60).
    """
    by_format: dict[str, list[str]] = {}
    for name, spec in kv_cache_spec.items():
        for names in by_format.values():
            if _mergeable([*(kv_cache_spec[other] for other in names), spec]):
                names.append(name)
                break
        else:
            by_format[name] = [name]
    counts = [len(names) for names in by_format.values()]
    length = max(counts) if max(counts) < 1.25 * min(counts) else min(counts)
    grouped = []
    for names in by_format.values():
        parts = cdiv(len(names), length)
        # Every parts-th layer, so that each group spans the whole depth of the model and a
        # pipeline stage has some layers of each.
        grouped += [names[part::parts] for part in range(parts)]
    return create_kv_cache_group_specs(kv_cache_spec, grouped)


def _mergeable(specs: Sequence[KVCacheSpec]) -> bool:
    try:
        type(specs[0]).merge(specs)
    except KVCacheSpecError:
        return False
    return True


def unify_page_sizes(kv_cache_spec: Specs) -> dict[str, KVCacheSpec]:
    """Give all layers one page size, so that they can share memory.

    A smaller attention page takes in as many blocks as fit in the largest (a larger block size),
    and is padded by what remains. States of recurrent layers are padded.

    Raises:
        KVCacheSpecError: a format that can neither grow nor be padded.
    """
    largest = max(spec.page_size_bytes for spec in kv_cache_spec.values())
    unified: dict[str, KVCacheSpec] = {}
    for name, spec in kv_cache_spec.items():
        times, rest = divmod(largest, spec.page_size_bytes)
        if times == 1 and not rest:
            unified[name] = spec
        elif isinstance(spec, AttentionSpec) and spec.page_size_padded is None:
            unified[name] = replace(
                spec,
                block_size=spec.block_size * times,
                page_size_padded=largest if rest else None,
            )
        elif isinstance(spec, AttentionSpec | MambaSpec):
            unified[name] = replace(spec, page_size_padded=largest)
        else:
            raise KVCacheSpecError(
                f"{name}: {type(spec).__name__} has pages of {spec.page_size_bytes} bytes, which "
                f"cannot be made {largest}"
            )
    return unified


def unify_hybrid_kv_cache_specs(kv_cache_spec: Specs) -> dict[str, KVCacheSpec]:
    """Keep windowed layers as full attention, for engines that manage one kind only.

    Where a model has both, sliding-window and chunked layers become full attention that records
    their window; a model without full attention is left alone.

    Raises:
        KVCacheSpecError: kinds remain that no conversion unites.
    """
    specs = dict(kv_cache_spec)
    if UniformTypeKVCacheSpecs.is_uniform_type(specs):
        return specs
    if any(isinstance(spec, FullAttentionSpec) for spec in specs.values()):
        latent = any(isinstance(spec, MLAAttentionSpec) for spec in specs.values())
        if not latent:
            specs = {name: _as_full_attention(spec) for name, spec in specs.items()}
    if UniformTypeKVCacheSpecs.is_uniform_type(specs):
        return specs
    instead = "plan them as groups of their own with get_kv_cache_config()"
    one_size = {name: replace(spec, block_size=1) for name, spec in specs.items()}
    if UniformTypeKVCacheSpecs.is_uniform_type(one_size):
        examples: dict[int, str] = {}
        for name, spec in specs.items():
            examples.setdefault(spec.block_size, name)
        sizes = ", ".join(f"{name}: {size}" for size, name in examples.items())
        raise KVCacheSpecError(
            f"block sizes differ ({sizes}): give all layers one block_size, or {instead}"
        )
    kinds = ", ".join(sorted({_kind_name(spec) for spec in specs.values()}))
    raise KVCacheSpecError(f"layers of kinds {kinds} cannot be kept as one kind: {instead}")


def _kind_name(spec: KVCacheSpec) -> str:
    names = ("sliding_window", "attention_chunk_size", "num_speculative_blocks")
    given = [f"{name}={getattr(spec, name)}" for name in names if getattr(spec, name, None)]
    return f"{type(spec).__name__}({', '.join(given)})"


def _as_full_attention(spec: KVCacheSpec) -> KVCacheSpec:
    if not isinstance(spec, SlidingWindowSpec | ChunkedLocalAttentionSpec):
        return spec
    return FullAttentionSpec(
        **{field.name: getattr(spec, field.name) for field in fields(AttentionSpec)},
        sliding_window=getattr(spec, "sliding_window", None),
        attention_chunk_size=getattr(spec, "attention_chunk_size", None),
    )


# -- plans ---------------------------------------------------------------------------------------


def get_kv_cache_config(
    limits: ModelLimits,
    kv_cache_spec: Specs,
    available_memory_bytes: int,
    num_blocks_override: int | None = None,
    *,
    packed: bool = False,
) -> KVCacheConfig:
    """Plan the KV cache of a model.

    Args:
        limits: of the engine.
        kv_cache_spec: layer name → format, in layer order.
        available_memory_bytes: for all pages together, the null block's included.
        num_blocks_override: this many blocks, not as many as the memory would hold.
        packed: lay all layers of a block side by side in one allocation, so that a block is one
            piece of memory.

    Raises:
        KVCacheSpecError: formats that cannot be served together.
        InsufficientMemoryError: one request of ``max_model_len`` tokens does not fit.
    """
    groups = get_kv_cache_groups(kv_cache_spec)
    num_blocks = _blocks_within(available_memory_bytes, groups)
    if num_blocks_override is not None:
        num_blocks = num_blocks_override
    check_enough_blocks(limits, groups, num_blocks)
    return get_kv_cache_config_from_groups(groups, num_blocks, packed=packed)


def get_kv_cache_config_from_groups(
    groups: Sequence[KVCacheGroupSpec], num_blocks: int, *, packed: bool = False
) -> KVCacheConfig:
    """Lay out the pages of groups that are decided."""
    stride = block_bytes(groups) if packed else 0
    tensors = []
    offset = 0
    for layer_names, page in _tensor_slots(groups):
        if packed:
            tensors.append(KVCacheTensor(page * num_blocks, layer_names, offset, stride, 0))
            offset += page
        else:
            tensors.append(KVCacheTensor(page * num_blocks, layer_names))
    return KVCacheConfig(num_blocks, tensors, groups)


def _tensor_slots(groups: Sequence[KVCacheGroupSpec]) -> list[tuple[list[str], int]]:
    """List the tensors as (layers that share it, bytes of a page)."""
    if len(groups) == 1:
        only = groups[0]
        return [([name], only.layer_spec(name).page_size_bytes) for name in only.layer_names]
    pages = {group.kv_cache_spec.page_size_bytes for group in groups}
    if len(pages) != 1:
        raise KVCacheSpecError(
            f"groups have pages of {sorted(pages)} bytes: groups that share tensors need one page "
            "size; see unify_page_sizes()"
        )
    longest = max(len(group.layer_names) for group in groups)
    page = pages.pop()
    return [
        ([g.layer_names[i] for g in groups if i < len(g.layer_names)], page) for i in range(longest)
    ]


def block_bytes(groups: Sequence[KVCacheGroupSpec]) -> int:
    """Bytes one block id stands for, over all tensors."""
    return sum(page for _, page in _tensor_slots(groups))


def unify_kv_cache_configs(configs: Sequence[KVCacheConfig]) -> list[KVCacheConfig]:
    """Make the workers' plans agree, so that one block manager serves them all.

    Args:
        configs: one a worker; groups must correspond. Layer names may differ (pipeline stages).

    Returns:
        The plans, each with the smallest worker's number of blocks and tensors cut to it.

    Raises:
        KVCacheSpecError: the workers' groups differ in number, kind, or block size.
    """
    if not configs:
        raise KVCacheSpecError("unify_kv_cache_configs() needs the plan of at least one worker")
    first = configs[0]
    for rank, config in enumerate(configs[1:], 1):
        mine, theirs = _group_forms(config), _group_forms(first)
        if mine != theirs:
            raise KVCacheSpecError(
                f"worker {rank} has KV cache groups {mine}, worker 0 has {theirs}: give "
                "all workers the same groups"
            )
    num_blocks = min(config.num_blocks for config in configs)
    return [_with_blocks(config, num_blocks) for config in configs]


def _with_blocks(config: KVCacheConfig, num_blocks: int) -> KVCacheConfig:
    tensors = [
        replace(tensor, size=tensor.size // config.num_blocks * num_blocks)
        for tensor in config.kv_cache_tensors
    ]
    return replace(config, num_blocks=num_blocks, kv_cache_tensors=tensors)


def _group_forms(config: KVCacheConfig) -> list[object]:
    forms: list[object] = []
    for group in config.kv_cache_groups:
        spec = group.kv_cache_spec
        if isinstance(spec, UniformTypeKVCacheSpecs):
            kind = type(next(iter(spec.kv_cache_specs.values())))
            forms.append(("uniform", spec.block_size, kind))
        else:
            forms.append(spec)
    return forms


# -- memory --------------------------------------------------------------------------------------


def check_enough_kv_cache_memory(
    limits: ModelLimits, kv_cache_spec: Specs, available_memory_bytes: int
) -> None:
    """Check that one request of ``max_model_len`` tokens fits, the null block reserved.

    Raises:
        InsufficientMemoryError: says how much memory, or what length, would do.
    """
    groups = get_kv_cache_groups(kv_cache_spec)
    check_enough_blocks(limits, groups, _blocks_within(available_memory_bytes, groups))


def _blocks_within(available_memory_bytes: int, groups: Sequence[KVCacheGroupSpec]) -> int:
    """Return how many blocks so much memory holds."""
    memory: object = available_memory_bytes  # an engine may not check its types
    if not isinstance(memory, int):
        remedy = "must be a whole number of bytes, as 64 << 20"
        raise KVCacheSpecError(f"available_memory_bytes = {memory!r}: {remedy}")
    return max(0, memory) // block_bytes(groups)


def check_enough_blocks(
    limits: ModelLimits, groups: Sequence[KVCacheGroupSpec], num_blocks: int
) -> None:
    """Check that one request of ``max_model_len`` tokens fits into so many blocks.

    Raises:
        InsufficientMemoryError: says how much memory, or what length, would do.
    """
    needed = blocks_of_one_request(limits, groups) + NULL_BLOCKS
    if needed <= num_blocks:
        return
    one_block = block_bytes(groups)
    longest = _longest_fitting_len(limits, groups, num_blocks)
    shorter = f", or set max_model_len to at most {longest}" if longest else ""
    raise InsufficientMemoryError(
        f"the memory for the KV cache holds {max(num_blocks, 0)} blocks of {one_block} bytes, but "
        f"one request of max_model_len = {limits.max_model_len} tokens needs {needed} (the "
        f"reserved null block included): give at least {needed * one_block} bytes{shorter}"
    )


def estimate_max_model_len(
    limits: ModelLimits, kv_cache_spec: Specs, available_memory_bytes: int
) -> int:
    """Return the longest request, up to ``max_model_len``, that fits; 0 if none does."""
    groups = get_kv_cache_groups(kv_cache_spec)
    num_blocks = _blocks_within(available_memory_bytes, groups)
    return _longest_fitting_len(limits, groups, num_blocks)


def blocks_of_one_request(limits: ModelLimits, groups: Sequence[KVCacheGroupSpec]) -> int:
    """Most blocks one request holds at a time, over all groups."""
    return sum(
        cdiv(
            group.kv_cache_spec.max_memory_usage_bytes(limits), group.kv_cache_spec.page_size_bytes
        )
        for group in groups
    )


def _longest_fitting_len(
    limits: ModelLimits, groups: Sequence[KVCacheGroupSpec], num_blocks: int
) -> int:
    low, high = 0, limits.max_model_len
    while low < high:
        middle = (low + high + 1) // 2
        needed = blocks_of_one_request(replace(limits, max_model_len=middle), groups)
        if needed + NULL_BLOCKS <= num_blocks:
            low = middle
        else:
            high = middle - 1
    return low
