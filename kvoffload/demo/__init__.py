"""A small real LLM engine that keeps its KV cache with kvoffload. Start reading in engine.py."""

from kvoffload.demo.config import EngineConfig, ModelConfig, parse_engine_config
from kvoffload.demo.engine import Engine
from kvoffload.demo.request import RequestResult
from kvoffload.demo.sampling import SamplingParams

__all__ = [
    "Engine",
    "EngineConfig",
    "ModelConfig",
    "RequestResult",
    "SamplingParams",
    "parse_engine_config",
]
