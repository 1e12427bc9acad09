"""Text to token ids and back, exactly.

A chat prompt is a list of segments: markers, one id each, and text, which is encoded by a copy of the tokenizer that
knows no added tokens, so that nobody can write a marker. Decoding is UTF-8 over a table of each id's bytes. Knows the
tokenizer's file, not messages.
"""

from __future__ import annotations

import asyncio
import codecs
import json
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import tokenizers

from ..core.errors import ConfigError, QueueFull

T = TypeVar("T")

_PRIME_TOKENS = 8
"""Tokens that surely hold the start of an unfinished character: it has at most three bytes so far."""


@dataclass(frozen=True)
class Segment:
    """A piece of a prompt: a marker by name, or text in which marker spellings mean nothing."""

    text: str
    is_marker: bool = False


def _byte_alphabet() -> dict[str, int]:
    """The printable stand-ins of byte-level BPE, back to their bytes."""
    kept = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {chr(value): value for value in kept}
    spare = 256
    for value in range(256):
        if value not in kept:
            table[chr(spare)] = value
            spare += 1
    return table


def _encode(tokenizer: Any, text: str) -> list[int]:
    """Ids of one text. As a batch of one, because `encode` holds the interpreter's lock, for minutes if need be."""
    ids: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
    return ids


def _is_byte_level(node: Any) -> bool:
    if not isinstance(node, dict):
        return False
    if node.get("type") == "Sequence":
        return all(_is_byte_level(part) for part in node.get("decoders", []))
    return node.get("type") == "ByteLevel"


class Tokenizer:
    """One checkpoint's tokenizer. Thread-safe: nothing changes after construction."""

    def __init__(self, definition: str) -> None:
        """
        Args:
            definition: the text of tokenizer.json.
        Raises:
            ConfigError: it is no byte-level BPE without normaliser; anything else would be decoded wrongly.
        """
        try:
            document = json.loads(definition)
            normaliser = document.get("normalizer")
            if normaliser is not None and normaliser.get("normalizers") != []:
                raise ConfigError("the tokenizer has a normaliser; only plain byte-level BPE is decoded exactly")
            if document["model"]["type"] != "BPE" or not _is_byte_level(document.get("decoder")):
                raise ConfigError("the tokenizer is no byte-level BPE; its text could not be decoded exactly")
            self._full: Any = tokenizers.Tokenizer.from_str(definition)
            added = document.get("added_tokens") or []
            self._plain: Any = tokenizers.Tokenizer.from_str(json.dumps({**document, "added_tokens": []}))
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(f"tokenizer.json cannot be used: {error}") from error
        for copy in (self._full, self._plain):
            copy.no_truncation()
            copy.no_padding()
        self.added_ids: dict[str, int] = {token["content"]: token["id"] for token in added}
        self.special_ids = frozenset(token["id"] for token in added if token.get("special"))
        vocabulary: dict[str, int] = self._full.get_vocab(with_added_tokens=True)
        self.token_bytes: list[bytes] = [b""] * (max(vocabulary.values()) + 1)
        alphabet = _byte_alphabet()
        for token, index in vocabulary.items():
            mapped = [alphabet[character] for character in token if character in alphabet]
            self.token_bytes[index] = bytes(mapped) if len(mapped) == len(token) else token.encode()
        for token, index in self.added_ids.items():
            self.token_bytes[index] = token.encode()
        self.longest_token_bytes = max(map(len, self.token_bytes))

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        path = folder / "tokenizer.json"
        try:
            return cls(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"model.path: no tokenizer.json in {folder}") from error

    @property
    def vocab_size(self) -> int:
        """One more than the highest id that has a spelling."""
        return len(self.token_bytes)

    def marker_id(self, name: str) -> int:
        """The id of an added token.

        Raises:
            ConfigError: the checkpoint's tokenizer has none of this name.
        """
        try:
            return self.added_ids[name]
        except KeyError:
            raise ConfigError(f"the tokenizer has no token {name!r}; it does not fit this chat format") from None

    def encode_segments(self, segments: Iterable[Segment]) -> list[int]:
        """Ids of a chat prompt: marker spellings in text stay text."""
        ids: list[int] = []
        for segment in segments:
            if segment.is_marker:
                ids.append(self.marker_id(segment.text))
            elif segment.text:
                ids.extend(_encode(self._plain, segment.text))
        return ids

    def encode_raw(self, text: str) -> list[int]:
        """Ids of a raw prompt, whose author renders markers himself."""
        return _encode(self._full, text)

    def bytes_of(self, token: int) -> bytes:
        """The token's own bytes; none for an id without a spelling."""
        return self.token_bytes[token] if 0 <= token < len(self.token_bytes) else b""

    def text_of(self, token: int) -> str:
        """The token alone as text, for log-probability lists; broken bytes show as U+FFFD."""
        return self.bytes_of(token).decode("utf-8", "replace")

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        """All at once."""
        return b"".join(
            self.bytes_of(token) for token in ids if not (skip_special and token in self.special_ids)
        ).decode("utf-8", "replace")


class Detokeniser:
    """Token by token, the text that has become certain; one for each choice.

    Joined, the pieces equal the decoding of all ids at once; a character is never cut.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True, prompt: Sequence[int] = ()) -> None:
        """
        Args:
            prompt: ids before the output; an unfinished character at their end is completed by the output.
        """
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special else frozenset[int]()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for token in prompt[-_PRIME_TOKENS:]:
            self.feed(token)

    def feed(self, token: int) -> str:
        if token in self._skipped:
            return ""
        return self._decoder.decode(self._tokenizer.bytes_of(token))

    def flush(self) -> str:
        """Unfinished bytes, as one U+FFFD; the decoder starts afresh."""
        rest = self._decoder.decode(b"", True)
        self._decoder.reset()
        return rest


class TokenizerPool:
    """Encoding off the event loop: a few threads (`_encode` leaves them the lock) and a bound on what waits."""

    def __init__(self, tokenizer: Tokenizer, *, threads: int, max_waiting: int = 256) -> None:
        self.tokenizer = tokenizer
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="tokenizer")
        self._max_waiting = max_waiting
        self._waiting = 0

    async def encode_segments(self, segments: Sequence[Segment]) -> list[int]:
        return await self.run(lambda: self.tokenizer.encode_segments(segments))

    async def encode_raw(self, texts: Sequence[str]) -> list[list[int]]:
        return await self.run(lambda: [self.tokenizer.encode_raw(text) for text in texts])

    async def run(self, work: Callable[[], T]) -> T:
        """Other work on a prompt.

        Raises:
            QueueFull: too much waits.
        """
        if self._waiting >= self._max_waiting:
            raise QueueFull("too many prompts wait for the tokenizer")
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, work)
        finally:
            self._waiting -= 1

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)
