"""Text to token ids and back: bytes, or a checkpoint's ``tokenizer.json``."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvoffload.errors import ConfigError


class ByteTokenizer:
    """Every byte of UTF-8 is a token; id 256 ends a text."""

    EOS = 256
    vocab_size = 257

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(t for t in token_ids if t < self.EOS).decode(errors="replace")


class FileTokenizer:
    """A Hugging Face ``tokenizer.json``, read with the tokenizers library."""

    def __init__(self, path: Path) -> None:
        try:
            from tokenizers import Tokenizer as Loaded
        except ImportError as error:
            remedy = "reading tokenizer.json needs a library: pip install tokenizers"
            raise ConfigError("checkpoint", str(path), remedy) from error
        try:
            self._tokenizer: Any = Loaded.from_file(str(path))
        except Exception as error:  # the library raises plain Exception for a bad file
            raise ConfigError("checkpoint", str(path), f"not a tokenizer: {error}") from error
        self.vocab_size = self._tokenizer.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids)))


Tokenizer = ByteTokenizer | FileTokenizer


def open_tokenizer(checkpoint: Path | None) -> Tokenizer:
    """Return the checkpoint's own tokenizer if its folder has one, otherwise bytes."""
    if checkpoint is not None and (checkpoint / "tokenizer.json").is_file():
        return FileTokenizer(checkpoint / "tokenizer.json")
    return ByteTokenizer()
