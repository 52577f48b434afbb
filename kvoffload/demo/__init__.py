"""A small real LLM engine that keeps its KV cache with kvoffload; mini_engine.py comes first."""

from kvoffload.demo.engine_config import EngineConfig, ModelConfig, parse_engine_config
from kvoffload.demo.engine_request import RequestResult
from kvoffload.demo.mini_engine import Engine
from kvoffload.demo.sampling import SamplingParams

__all__ = [
    "Engine",
    "EngineConfig",
    "ModelConfig",
    "RequestResult",
    "SamplingParams",
    "parse_engine_config",
]
