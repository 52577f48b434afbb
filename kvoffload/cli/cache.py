"""``kvoffload cache``: ask the engines of this user that run on this machine."""

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from kvoffload.cli.output import console, fail, is_answered, say, table_of
from kvoffload.cli.stores import AsJson
from kvoffload.control import (
    HOST,
    ORDER_S,
    Answer,
    Clear,
    Describe,
    EngineFacts,
    EngineSocket,
    Found,
    Lookup,
    Question,
    engine_sockets,
    folders,
    is_supported,
)
from kvoffload.errors import ConfigError

app = typer.Typer(
    help="Look into the cache of an engine that runs here, or empty it.\n\n"
    "Exit codes: 0 done; 1 the engine cannot be asked, or failed; 2 wrong usage.",
    no_args_is_help=True,
    add_completion=False,
)
EngineName = Annotated[
    str | None, typer.Option("--engine", metavar="PID", help="Which engine, where several run.")
]


@app.command("list")
def list_engines(as_json: AsJson = False) -> None:
    """List the engines of this user on this machine that can be asked.

    Exit codes: 0 done, 1 there is none, 2 wrong usage.
    """
    found = [(sock, _facts(sock)) for sock in _sockets()]
    if as_json:
        print(json.dumps([{"engine": sock.engine, **_plain(facts)} for sock, facts in found]))
        return
    rows = [
        (sock.engine, *((facts.model, ", ".join(facts.tiers)) if facts else ("busy", "")))
        for sock, facts in found
    ]
    console().print(table_of(("engine", "model", "tiers"), rows))


@app.command()
def lookup(
    engine: EngineName = None,
    token_ids: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="File with the prompt's token ids, as JSON or words; - for standard input.",
        ),
    ] = None,
    text: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="File with the prompt as text; - for standard input."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="The tokenizer for --text; default: the engine's."),
    ] = None,
    salt: Annotated[str, typer.Option(help="The cache_salt of the request.")] = "",
    as_json: AsJson = False,
) -> None:
    """Say how much of a prompt each tier of a running engine has.

    A tier that does not answer in the engine's lookup_timeout_s has nothing, as for a request.
    Prompts with adapters or images have other block hashes, and cannot be looked up.

    Exit codes: 0 done, 1 the engine cannot answer, 2 wrong usage.
    """
    if (token_ids is None) == (text is None):
        raise ConfigError("token-ids", token_ids, "give --token-ids FILE, or --text FILE")
    prompt = None if token_ids is None else _parsed(_read(token_ids, "token-ids"))
    words = "" if text is None else _read(text, "text")
    sock = _chosen(engine)
    if prompt is None:
        facts = _ask(sock, Describe()).engine
        prompt = _tokenized(words, model or (facts.tokenizer if facts else ""), text or "")
    answer = _ask(sock, Lookup(prompt, salt), ORDER_S)
    if answer.found is None:
        fail(f"engine {sock.engine}: {answer.error}")
    if as_json:
        print(json.dumps(_plain(answer.found)))
    else:
        _show(answer.found)


@app.command()
def clear(
    engine: EngineName = None,
    tier: Annotated[
        str, typer.Option(help="This one alone: cpu is host memory. Default: all.")
    ] = "",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Ask nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove the chunks of a running engine, from one of its tiers or all.

    Other engines of the same model and settings share a folder or a server: they lose the chunks
    too. So this asks first, except for host memory; a script needs --yes. What is in GPU memory
    stays, and is right. Requests that run store nothing more.

    Exit codes: 0 done, or the answer was no; 1 not done, or not all; 2 wrong usage.
    """
    sock = _chosen(engine)
    facts = _ask(sock, Describe()).engine or EngineFacts(0, "", "", [])
    if tier and tier not in facts.tiers:
        raise ConfigError("tier", tier, f"the engine has {', '.join(facts.tiers)}")
    going = [tier] if tier else facts.tiers
    if going != [HOST] and not yes:
        if not is_answered():
            raise ConfigError("yes", False, "other engines lose these chunks too: give --yes")
        stores = ", ".join(name for name in going if name != HOST)
        notice = f"engines that share {stores} with engine {sock.engine} lose these chunks too"
        say(notice, stderr=True)
        if not typer.confirm(f"Remove all chunks of {facts.model}?", err=True):
            return
    answer = _ask(sock, Clear(tier), ORDER_S)
    if answer.error:
        fail(f"engine {sock.engine}: {answer.error}")
    if as_json:
        print(json.dumps({"engine": sock.engine, "cleared": going}))
    else:
        say(f"engine {sock.engine}: {', '.join(going)} cleared")


# ---- which engine ----


def _sockets() -> list[EngineSocket]:
    """Return the sockets of this user's engines.

    Raises:
        ConfigError: the folder is not private.
        typer.Exit: with code 1 if there is none; the reason is printed.
    """
    found = engine_sockets() if is_supported() else []
    if not found:
        fail(f"no engine of this user can be asked; its socket would be in {_places()}")
    return found


def _places() -> str:
    return " or ".join(folders()) if is_supported() else "a folder on Linux"


def _chosen(engine: str | None) -> EngineSocket:
    found = _sockets()
    named = [sock for sock in found if engine in (None, sock.engine)]
    if len(named) != 1:
        remedy = f"name one of {', '.join(sock.engine for sock in found)}"
        raise ConfigError("engine", engine, remedy)
    return named[0]


def _facts(sock: EngineSocket) -> EngineFacts | None:
    """Return what an engine is; None if it carries out an order of someone else."""
    try:
        return sock.ask(Describe()).engine
    except (OSError, msgspec.DecodeError):
        return None


def _ask(sock: EngineSocket, question: Question, timeout_s: float = ORDER_S) -> Answer:
    try:
        return sock.ask(question, timeout_s)
    except (OSError, msgspec.DecodeError) as error:
        fail(f"engine {sock.engine} cannot be asked: {error}")


# ---- the prompt ----


def _read(source: str, field: str) -> str:
    try:
        return sys.stdin.read() if source == "-" else Path(source).read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(field, source, f"cannot be read: {reason}") from error


def _parsed(text: str) -> list[int]:
    """Read token ids, as JSON or with blanks or commas between them."""
    words = re.split(r"[\s,]+", text.strip().removeprefix("[").removesuffix("]").strip(" \n,"))
    wrong = next((word for word in words if not re.fullmatch("[0-9]{1,9}", word)), None)
    if wrong is not None:
        raise ConfigError("token-ids", wrong, "must be whole numbers from 0 on")
    return [int(word) for word in words]


def _tokenized(text: str, model: str, source: str) -> list[int]:
    """Return a text's token ids, as vLLM's completions have them; downloads nothing."""
    try:
        from transformers import AutoTokenizer
    except ImportError:
        remedy = "needs the package transformers; run this in the engine's environment"
        raise ConfigError("text", source, remedy) from None
    if not model:
        raise ConfigError("model", None, "this engine has no tokenizer: name its folder")
    try:
        tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
        ids: Sequence[int] = tokenizer(text)["input_ids"]
    except Exception as error:
        raise ConfigError("model", model, f"has no tokenizer that can be used: {error}") from error
    return list(ids)


# ---- what is found ----


def _plain(found: object) -> dict[str, object]:
    plain_data: dict[str, object] = msgspec.to_builtins(found) if found is not None else {}
    return plain_data


def _show(found: Found) -> None:
    say(f"{found.tokens:,} tokens")
    for number, group in enumerate(found.groups):
        if len(found.groups) > 1:
            reads = "all chunks" if group.reads_all else "the chunks of a window"
            say(f"KV cache group {number}, which reads {reads}")
        rows = []
        for name, held in [*group.tiers.items(), ("any", group.any)]:
            counts = (held.leading * group.chunk_tokens, held.leading, held.chunks, group.chunks)
            rows.append((name, *(f"{count:,}" for count in counts)))
        numbers = ("tokens from the start", "chunks from the start", "chunks", "of")
        console().print(table_of(("tier", *numbers), rows, numbers=numbers))
        if group.missing:
            say(f"chunk {group.any.leading} is nowhere: {group.missing}")
