"""A small real LLM engine that keeps its KV cache with kvoffload. Start reading in engine.py."""

from mini_engine.config import EngineConfig, ModelConfig, parse_engine_config
from mini_engine.engine import Engine
from mini_engine.request import RequestResult
from mini_engine.sampling import SamplingParams

__all__ = [
    "Engine",
    "EngineConfig",
    "ModelConfig",
    "RequestResult",
    "SamplingParams",
    "parse_engine_config",
]
