"""``kvoffload size``: how much memory for what hit rate."""

import json
import math
from pathlib import Path
from typing import Annotated, Any

import typer

from kvoffload.backends.admin import counted
from kvoffload.cli.output import print_numbers, say
from kvoffload.cli.replay import (
    SAMPLE_HELP,
    SYNTHETIC_HELP,
    TRACE_HELP,
    facts,
    open_trace,
    progress_bar,
    tokens_of,
)
from kvoffload.config import human_bytes
from kvoffload.connectors.chunk_size import choose_chunk_size
from kvoffload.errors import ConfigError
from kvoffload.replay.model import bytes_per_token, read_config
from kvoffload.replay.sample import sampled
from kvoffload.replay.sizing import SizeForShare, curve, curve_sizes, size_for_share

_GPU_BLOCK_TOKENS = 16


def command(
    trace: Annotated[Path | None, typer.Argument(help=TRACE_HELP)] = None,
    model: Annotated[
        Path | None, typer.Option(help="The model's config.json, or its folder.")
    ] = None,
    block_tokens: Annotated[
        int | None,
        typer.Option(
            help="Tokens in a block of the trace, where the trace does not say it; without a "
            "trace, in a block of the GPU: 16 by default, as in vLLM."
        ),
    ] = None,
    kv_dtype: Annotated[str, typer.Option(help="Type of the KV cache; default: model's.")] = "",
    tensor_parallel: Annotated[int, typer.Option(help="Ranks of the engine.")] = 1,
    targets: Annotated[
        str, typer.Option(help="Shares of what an infinite store would hit, in percent.")
    ] = "50,80,90,95,99",
    policy: Annotated[str, typer.Option(help="The store's eviction policy.")] = "handicap",
    synthetic: Annotated[str, typer.Option(help=SYNTHETIC_HELP)] = "",
    sample: Annotated[float, typer.Option(help=SAMPLE_HELP)] = 1.0,
    prefill_tokens_per_s: Annotated[
        float | None,
        typer.Option(help="Tokens that the engine computes a second: adds the seconds saved."),
    ] = None,
    context: Annotated[
        int | None, typer.Option(help="Without a trace: tokens of a session to keep.", min=1)
    ] = None,
    sessions: Annotated[
        int, typer.Option(help="Without a trace: sessions to keep, with --context.", min=1)
    ] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Print how much memory a trace and a model need for what hit rate.

    Without a trace: the KV cache bytes of a token, and the tokens in a GiB; with --context, the
    memory that so many sessions take.

    Exit codes: 0 done; 2 wrong usage, or a trace or config.json that cannot be used.
    """
    if block_tokens is not None and block_tokens < 1:
        raise ConfigError("block_tokens", block_tokens, "must be at least 1")
    wanted = [_percent(text) for text in targets.split(",") if text]
    if not wanted:
        raise ConfigError("targets", targets, "must be percentages, such as 50,90,99")
    if model is None:
        raise ConfigError("model", None, "give --model: a config.json, or a model's folder")
    if prefill_tokens_per_s is not None and not prefill_tokens_per_s > 0:
        raise ConfigError("prefill_tokens_per_s", prefill_tokens_per_s, "must be above 0")
    sizes_of = read_config(model)
    token_bytes = bytes_per_token(sizes_of, kv_dtype or None, tensor_parallel)
    if trace is None and not synthetic:
        # Layers of several kinds are groups, whose sizes the engine chooses.
        is_one_group = len(set(map(str, sizes_of.get("layer_types") or ()))) < 2
        in_block = (block_tokens or _GPU_BLOCK_TOKENS) if is_one_group else None
        _print_token(token_bytes, tensor_parallel, context, sessions, in_block, as_json)
        return
    if context is not None:
        raise ConfigError("context", context, "a trace says how long its sessions are")
    whole = open_trace(trace, synthetic)
    loaded = sampled(whole, sample)
    tokens = tokens_of(loaded, block_tokens)
    with progress_bar(len(curve_sizes(loaded)) * loaded.accesses) as step:
        points = curve(loaded, policy, step)
    answers = [size_for_share(points, share) for share in wanted]
    block_bytes = token_bytes * tokens
    asked_s = whole.accesses * tokens / prefill_tokens_per_s if prefill_tokens_per_s else None
    if as_json:
        rows = [_plain(each, block_bytes, tensor_parallel, asked_s) for each in answers]
        sizes = {"bytes_per_token": token_bytes, "block_bytes": block_bytes}
        print(
            json.dumps(
                {"trace": facts(loaded), "model": sizes, "policy": policy, "rows": rows}
                | {"curve": [{"blocks": b, "prefix_hit_rate": round(r, 6)} for b, r in points]}
            )
        )
        return
    ranks = "one rank" if tensor_parallel == 1 else f"all {tensor_parallel} ranks together"
    title = (
        f"{human_bytes(token_bytes)} of KV cache a token, {human_bytes(block_bytes)} a block of "
        f"{tokens} tokens, on {ranks}; policy {policy}"
    )
    lines = [
        (
            f"{100 * each.share:.4g} %",
            [
                f"{100 * each.hit_rate:.2f} %",
                f"{each.blocks:,}",
                f"{each.blocks * tokens:,}",
                human_bytes(each.blocks * block_bytes),
                human_bytes(each.blocks * block_bytes / tensor_parallel),
                *([] if asked_s is None else [f"{each.hit_rate * asked_s:,.0f} s"]),
            ],
        )
        for each in answers
    ]
    saved = () if asked_s is None else ("prefill saved",)
    columns = ("prefix hits", "blocks", "tokens", "memory", "cpu_bytes", *saved)
    print_numbers(title, "of what can be hit", columns, lines)
    say(f"memory: on {ranks}; cpu_bytes: the setting, which is for each rank")


def _print_token(
    token_bytes: int,
    ranks: int,
    context: int | None,
    sessions: int,
    block_tokens: int | None,
    as_json: bool,
) -> None:
    tokens_per_gib = (1 << 30) // token_bytes
    whole = token_bytes * (context or 0) * sessions
    block_bytes = token_bytes * (block_tokens or 0) // ranks
    chunk = choose_chunk_size(block_bytes, block_tokens) if block_tokens else None
    if as_json:
        told = {"bytes_per_token": token_bytes, "tokens_per_gib": tokens_per_gib}
        if chunk and block_tokens:
            told["auto_chunk_tokens"] = chunk.num_blocks * block_tokens
            told["auto_chunk_bytes"] = chunk.num_blocks * block_bytes
        if context is not None:
            told |= {"bytes": whole, "bytes_per_rank": math.ceil(whole / ranks)}
        print(json.dumps(told))
        return
    where = "one rank" if ranks == 1 else f"all {ranks} ranks together"
    text = f"{human_bytes(token_bytes)} of KV cache a token on {where}; {tokens_per_gib:,} tokens"
    say(f"{text} in a GiB")
    if chunk and block_tokens:
        say(chunk.told(block_bytes, block_tokens))
    if context is not None:
        text = f"{counted(sessions, 'session')} of {context:,} tokens: {human_bytes(whole)}"
        say(f"{text}; cpu_bytes of each rank: {human_bytes(whole / ranks)}")


def _percent(text: str) -> float:
    try:
        percent = float(text)
    except ValueError:
        percent = 0.0
    if not 0 < percent <= 100:
        raise ConfigError("targets", text, "must be percentages above 0, at most 100")
    return percent / 100


def _plain(
    each: SizeForShare, block_bytes: int, ranks: int, asked_s: float | None
) -> dict[str, Any]:
    saved = {} if asked_s is None else {"prefill_saved_s": round(each.hit_rate * asked_s, 3)}
    return saved | {
        "share_of_infinite": each.share,
        "prefix_hit_rate": round(each.hit_rate, 6),
        "blocks": each.blocks,
        "bytes": each.blocks * block_bytes,
        "bytes_per_rank": math.ceil(each.blocks * block_bytes / ranks),
    }
