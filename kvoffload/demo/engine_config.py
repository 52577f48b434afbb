"""The engine's settings: frozen, strict, and checked before any memory is touched."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import msgspec

from kvoffload.config import ByteSize, convert
from kvoffload.demo.sampling import EOS
from kvoffload.demo.self_attention import SelfAttention
from kvoffload.errors import check_setting


def _check_counts(settings: msgspec.Struct, *others: str) -> None:
    """Refuse counts below 1; ``others`` are whole numbers that may be anything."""
    for name in settings.__struct_fields__:
        value = getattr(settings, name)
        is_other = type(value) is not int or name in others
        check_setting(settings, name, is_other or value >= 1, "must be at least 1")


class ModelConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The shape of a Llama-architecture decoder; the default is about 24 million weights."""

    hidden_size: int = 512
    num_layers: int = 8
    num_heads: int = 8
    num_kv_heads: int = 4
    head_size: int = 64
    intermediate_size: int = 1408
    vocab_size: int = 320
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0

    def __post_init__(self) -> None:
        _check_counts(self)
        check, heads = partial(check_setting, self), self.num_heads
        remedy = f"must divide num_heads = {heads}: KV heads serve equal groups of them"
        check("num_kv_heads", heads % self.num_kv_heads == 0, remedy)
        remedy = f"must be at least {EOS + 1}: bytes, and the end of a text"
        check("vocab_size", self.vocab_size > EOS, remedy)
        check("head_size", self.head_size % 2 == 0, "must be even: RoPE turns pairs")

    def mixer(self, layer: int) -> type[SelfAttention]:
        """Return what mixes tokens in a layer; a subclass may have layers of other kinds."""
        return SelfAttention


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the engine is started with. Read one from plain data with parse_engine_config()."""

    model: ModelConfig = ModelConfig()
    seed: int = 0
    """Of the random weights."""
    device: str = "cpu"
    dtype: str = "float32"
    block_size: int = 16
    """Tokens of one KV cache block."""
    kv_cache_bytes: ByteSize = ByteSize(256 << 20)
    """Memory for KV blocks on the device."""
    max_model_len: int = 4096
    """The longest prompt and answer together, in tokens."""
    max_num_seqs: int = 16
    """Requests in one forward pass."""
    max_num_batched_tokens: int = 512
    """Tokens in one forward pass; longer prompts are computed in chunks of it."""
    enable_prefix_caching: bool = True
    offload: dict[str, Any] | None = None
    """kvoffload's settings (:class:`kvoffload.config.OffloadConfig`); None: no offloading."""

    def __post_init__(self) -> None:
        _check_counts(self, "seed")
        check, longest, most = partial(check_setting, self), self.max_model_len, self.max_num_seqs
        is_known = self.dtype in ("float32", "bfloat16", "float16")
        check("dtype", is_known, "use float32, bfloat16 or float16")
        remedy = f"must divide max_model_len = {longest}: a sequence is whole blocks"
        check("block_size", longest % self.block_size == 0, remedy)
        remedy = f"must be at least max_num_seqs = {most}: one token each per step"
        check("max_num_batched_tokens", self.max_num_batched_tokens >= most, remedy)
        remedy = "offloading finds blocks by prefix: leave it on, or set offload to null"
        check("enable_prefix_caching", self.offload is None or self.enable_prefix_caching, remedy)


def parse_engine_config(raw: Mapping[str, Any]) -> EngineConfig:
    """Read plain data (a JSON file, keyword arguments) into settings.

    Raises:
        ConfigError: names the field, its value and what would be right.
    """
    data = dict(raw)
    if isinstance(data.get("model"), Mapping):
        data["model"] = msgspec.structs.asdict(convert(data["model"], ModelConfig, "model."))
    return convert(data, EngineConfig)
