"""Facts of a SGLang engine, by exclusion: all that it is configured with, but what is harmless.

SGLang keeps what the user wrote apart from what it became. Facts are of the latter: ``auto`` means
another attention backend on another machine.
"""

import hashlib
import json
import logging
import os
import platform
import re
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from kvoffload.connectors.configuration import fact, facts_of
from kvoffload.connectors.hf_config import hf_facts, names_other_weights
from kvoffload.connectors.sglang import harmless_arguments as harmless
from kvoffload.connectors.sglang.engine_start import BEGUN_NS, start_name
from kvoffload.connectors.sglang.hicache_settings import HiCacheSettings
from kvoffload.connectors.weight_samples import file_digest
from kvoffload.connectors.weights import (
    commit_of,
    files_digest,
    folder_digest,
    tokenizer_identity,
    was_changed,
    weights_identity,
)
from kvoffload.identity import Fact

log = logging.getLogger(__name__)

_READS_FILES = frozenset(
    {
        "auto", "safetensors", "pt", "npcache", "mistral", "gguf", "bitsandbytes", "sharded_state",
        "fastsafetensors", "instanttensor", "layered",
    }
)  # fmt: skip
"""Load formats that read the files of the model's folder, and nothing else."""
_OTHER_SOURCES = (
    "checkpoint_engine_wait_weights_before_ready", "custom_weight_loader", "kt_weight_path",
    "modelopt_checkpoint_restore_path", "modelopt_quant", "modelexpress_config", "rl_quant_profile",
    "decrypted_config_file",
)  # fmt: skip
_OPTIONS_OF_READING = frozenset({"enable_multithread_load", "num_threads", "enable_gds"})
"""Keys of ``model_loader_extra_config`` that do not say what is read."""
_FILES = ("quantization_param_path", "speculative_token_map")
_MAY_HAVE_SECRETS = frozenset(
    {"model_loader_extra_config", "modelexpress_config", "unified_cache_external_linker_config"}
)
_OF_POOL = "of the pool"
_PREFIXES = ("SGLANG_", "SGL_")
_OF_A_SERVICE = re.compile(r".*_(SERVICE_HOST|SERVICE_PORT\w*|PORT|PORT_\d+_(TCP|UDP)\w*)")
"""Kubernetes sets such variables for each service of a cluster, also for one named SGLang."""


def engine_facts(settings: HiCacheSettings) -> dict[str, Fact]:
    """Collect every fact of this process' engine, but those of its pools and ranks."""
    from sglang.srt.runtime_context import get_server_args, process_model_config

    args = get_server_args()
    return facts_of_engine(args, resolved(args), process_model_config(), settings)


def facts_of_engine(
    args: Any, values: Mapping[str, Any], model_config: Any, settings: HiCacheSettings
) -> dict[str, Fact]:
    """Collect the facts of a configuration.

    Args:
        args: SGLang's ``ServerArgs``.
        values: what each field has become; see :func:`resolved`.
        model_config: SGLang's ``ModelConfig``.
        settings: may name the weights.
    """
    is_quantized = model_config.quantization is not None
    kind = kv_dtype(values["kv_cache_dtype"])
    has_adapters = bool(values.get("enable_lora") or values.get("lora_paths"))
    return {
        "engine": f"sglang {version('sglang')}",
        "label.model": str(values["model_path"]),
        "platform": platform_name(str(values["device"]), is_quantized or kind != _OF_POOL),
        # Kernels without them round between a layer's halves otherwise, or not at all.
        "adapters": has_adapters if is_quantized else None,
        "token_table": _token_table(values, model_config),
        "files": settings.weights_id and files_digest(Path(str(values["model_path"]))),
        **weights_facts(values, settings, model_config.hf_config),
        **config_facts(model_config.hf_config),
        "dtype": str(model_config.dtype),
        "kv_dtype": kind,
        **argument_facts(type(args), values),
        **variable_facts(),
    }


def _token_table(values: Mapping[str, Any], model_config: Any) -> str | None:
    """Tell the tokenizer of a model with engrams: their rows are found by the texts of tokens.

    Source: ``EngramHasher.from_config`` of SGLang.
    """
    configs = (model_config.hf_config, model_config.hf_text_config)
    if not any(getattr(config, "engram_layer_ids", None) for config in configs):
        return None
    tokenizer = str(values.get("tokenizer_path") or values["model_path"])
    told = tokenizer_identity(tokenizer, values.get("revision"))
    return f"{told}, {values.get('tokenizer_mode')}, tokenizers {version('tokenizers')}"


def config_facts(hf_config: Any) -> dict[str, Fact]:
    """Return the fields of a model's configuration, as SGLang's model code sees them.

    SGLang writes ``context_len`` into it. A few models size their table of positions by it, which
    changes an entry only where positions are scaled.
    """
    facts = hf_facts(hf_config)
    if not _scales_positions(hf_config.to_dict()):
        facts.pop("hf_config.context_len", None)
    return facts


def _scales_positions(value: Any) -> bool:
    if not isinstance(value, Mapping):
        return False
    kind = value.get("rope_type", value.get("type"))
    is_scaled = "factor" in value or (isinstance(kind, str) and kind not in ("default", "mrope"))
    return is_scaled or any(map(_scales_positions, value.values()))


def resolved(args: Any) -> dict[str, Any]:
    """Return what each field of ``ServerArgs`` has become, also after the command line was read."""
    from sglang.srt.runtime_context import get_context

    values: dict[str, Any] = args.resolved_dict()
    for name in values:
        try:
            values[name] = get_context().config_leaf(name)
        except (ValueError, AttributeError):  # not published: a field for the start alone
            continue
    return values


def kv_dtype(asked: Any) -> str:
    """Return the dtype of the KV cache; its pool may only tell how many bytes a value has."""
    text = str(asked)
    # These become the dtype of the pool, or what the model's configuration says.
    return _OF_POOL if text in ("auto", "bf16", "bfloat16") else text


def argument_facts(kind: Any, values: Mapping[str, Any]) -> dict[str, Fact]:
    """Return the fields that are not harmless, where they are not SGLang's defaults."""
    defaults = default_arguments(kind)
    told = {
        name: value
        for name, value in values.items()
        if name not in harmless.ARGUMENTS and (name not in defaults or value != defaults[name])
    }
    if _only_options(told.get("model_loader_extra_config")):
        told.pop("model_loader_extra_config", None)
    hidden = _MAY_HAVE_SECRETS & told.keys()
    told |= {name: _digest(fact(name, told[name])) for name in hidden}
    return facts_of(told, prefix="server.")


def default_arguments(kind: Any) -> dict[str, Any]:
    """Return the default of each field of ``ServerArgs`` that has one."""
    import msgspec

    found = {}
    for field in msgspec.structs.fields(kind):
        if field.default is not msgspec.NODEFAULT:
            found[field.name] = field.default
        elif field.default_factory is not msgspec.NODEFAULT:
            found[field.name] = field.default_factory()
    return found


def variable_facts() -> dict[str, Fact]:
    """Return SGLang's environment variables that are not harmless, and not at their defaults."""
    from sglang.srt.environ import envs

    found: dict[str, Any] = {}
    for name in sorted(os.environ):
        if name in harmless.VARIABLES:
            continue
        field = vars(type(envs)).get(name)
        if hasattr(field, "_resolve_default"):
            if (value := field.get()) != field._resolve_default():
                found[name] = value
        elif name in harmless.READ_ELSEWHERE or (
            name.startswith(_PREFIXES) and not _OF_A_SERVICE.fullmatch(name)
        ):
            found[name] = os.environ[name]
    return facts_of(found, prefix="env.")


def weights_facts(
    values: Mapping[str, Any], settings: HiCacheSettings, hf_config: Any
) -> dict[str, Fact]:
    """Tell the weights of the model and its draft by content, and files that scale them."""
    load_format = str(getattr(values["load_format"], "value", values["load_format"]))
    model, revision = str(values["model_path"]), values.get("revision")
    is_strange = names_other_weights(hf_config) or _moved(model, revision, hf_config)
    facts: dict[str, Fact] = {
        "weights": _weights(values, load_format, model, revision, settings, is_strange)
    }
    if draft := values.get("speculative_draft_model_path"):
        draft_format = str(values.get("speculative_draft_load_format") or load_format)
        revision = values.get("speculative_draft_model_revision")
        is_strange = _moved(str(draft), revision, None)
        facts["draft_weights"] = _weights(
            values, draft_format, str(draft), revision, settings, is_strange
        )
        if (config := Path(str(draft)) / "config.json").is_file():  # that of the model is resolved
            facts["content.draft_config"] = _content(str(config))
    for name in _FILES:
        if path := values.get(name):
            facts[f"content.{name}"] = _content(str(path))
    if path := values.get("uno_lora_path"):
        facts["content.uno_lora_path"] = folder_digest(Path(path)) or _unknown(str(path))
    return facts


def _weights(
    values: Mapping[str, Any],
    load_format: str,
    model: str,
    revision: str | None,
    settings: HiCacheSettings,
    is_strange: bool,
) -> str:
    is_elsewhere = is_strange or any(_other_sources(values, model))
    return weights_identity(
        settings.weights_id,
        model,
        revision,
        reads_files=load_format in _READS_FILES and not is_elsewhere,
        dummy_seed=values["random_seed"] if load_format == "dummy" else None,
        unknown=f"known to this start alone: {start_name()}",
    )


def _moved(model: str, revision: str | None, hf_config: Any) -> bool:
    """Whether a hub's name may mean another commit now than when SGLang read the weights."""
    if Path(model).is_dir():
        return False
    if loaded := getattr(hf_config, "_commit_hash", None):
        return commit_of(model, revision) != str(loaded)
    try:
        from huggingface_hub import constants

        folder = Path(constants.HF_HUB_CACHE, f"models--{model.replace('/', '--')}")
        return (folder / "refs" / (revision or "main")).stat().st_ctime_ns > BEGUN_NS
    except (ImportError, OSError, ValueError):  # a commit's own name, or no hub's
        return False


def _other_sources(values: Mapping[str, Any], model: str) -> Iterator[Any]:
    """Yield what is true where weights do not come from the files of the model alone."""
    yield from (values.get(name) for name in _OTHER_SOURCES)
    yield values.get("weight_cache_mode", "off") != "off"
    yield not _only_options(values.get("model_loader_extra_config"))
    yield os.environ.get("SGLANG_EXPERT_PACK_PATH")
    # A folder is read as it is; a name may be ModelScope's, and no commit of a hub tells those.
    is_folder = Path(model).is_dir()
    yield not is_folder and os.environ.get("SGLANG_USE_MODELSCOPE", "0").lower() in ("1", "true")
    yield was_changed(model, BEGUN_NS)


def _only_options(extra: Any) -> bool:
    try:
        told = json.loads(extra) if isinstance(extra, str) else extra or {}
    except ValueError:
        return False
    return isinstance(told, dict) and told.keys() <= _OPTIONS_OF_READING


def _content(path: str) -> str:
    """Digest a file, or the file of a hub's repository: SGLang takes ``org/name/file``, too."""
    try:
        file = Path(path)
        repository, _, name = path.rpartition("/")
        if not file.exists() and (commit := commit_of(repository, None, name)):
            return f"commit {commit} {path}"
        return file_digest(file)
    except OSError as error:
        log.warning("kvoffload: %s cannot be read (%s), so each start is cold", path, error)
        return _unknown(path)


def _unknown(path: str) -> str:
    return f"{path}, known to this start alone: {start_name()}"


def _digest(value: Fact) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()


def platform_name(device: str, is_quantized: bool) -> str:
    """Name the kind of device, as far as it decides how values are computed and laid out.

    Kernels of a quantized model or KV cache may round values otherwise on another generation.
    """
    import torch

    if device == "cpu":
        kinds = [torch.backends.cpu.get_cpu_capability()]
        for name in ("_is_amx_tile_supported", "_is_avx512_bf16_supported"):
            kinds.append(str(getattr(torch.cpu, name, lambda: "unknown")()))
        return f"cpu {platform.machine()} {' '.join(kinds)}"
    if device == "cuda" and torch.version.hip is None:
        return f"cuda {torch.cuda.get_device_capability()}" if is_quantized else "cuda"
    found = torch.get_device_module(device).get_device_properties(0)
    return f"{device} {getattr(found, 'gcnArchName', getattr(found, 'name', 'unknown'))}"
