"""What is found out while vLLM reads its command line, before it loads a model."""

from collections.abc import Mapping
from types import FrameType
from typing import Any

from kvoffload.connectors.vllm.fingerprint import check_layout
from kvoffload.connectors.vllm.logs import follow_vllm
from kvoffload.connectors.vllm.settings import VllmConfigSettings, read_settings
from kvoffload.errors import ConfigError

CONNECTOR = "KVOffloadConnector"
ROLE = "kv_both"


def check_settings(extra: Mapping[str, Any]) -> VllmConfigSettings:
    """Read the settings, check what the environment asks of vLLM, and log where vLLM logs.

    Raises:
        ConfigError: a setting is wrong, or a wish of the environment cannot be met.
    """
    from vllm import envs

    follow_vllm(envs.VLLM_CONFIGURE_LOGGING)
    check_layout(envs.VLLM_KV_CACHE_LAYOUT)
    return read_settings(extra)


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


def check_asker(frame: FrameType | None) -> None:
    """Check the settings for which vLLM looks the connector's class up.

    On platforms with static graphs vLLM gives the class its settings early
    (``requires_piecewise_for_cudagraph``). On all other platforms, CPUs among them, it calls no
    method of ours before the model is loaded.

    vLLM looks the class up early on every platform. The function that does so has the settings;
    for a registered name it asks through a function of its registry. Without that argument the
    settings are checked when the connector is made.

    Args:
        frame: of the function that asked for the class.

    Raises:
        ConfigError: see :func:`check_settings`.
    """
    if frame is None:
        return
    config = frame.f_locals.get("kv_transfer_config")
    if config is None and frame.f_back is not None:
        config = frame.f_back.f_locals.get("kv_transfer_config")
    extra = getattr(config, "kv_connector_extra_config", None)
    if isinstance(extra, Mapping) and getattr(config, "kv_connector", None) == CONNECTOR:
        check_role(config)
        check_settings(extra)
