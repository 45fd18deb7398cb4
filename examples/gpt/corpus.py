"""Which text a run reads: a sorted list of documents, some of them held out for validation."""

from __future__ import annotations

import hashlib
import platform
import sysconfig
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Corpus", "Document", "read_corpus", "standard_library"]

# Not part of the library proper: what others installed, and tests.
_STDLIB_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclass(frozen=True)
class Document:
    """A file, or the bytes ``start:stop`` of one."""

    name: str
    path: Path
    held_out: bool
    start: int = 0
    stop: int | None = None

    def read(self) -> bytes:
        """The document's bytes."""
        with self.path.open("rb") as file:
            file.seek(self.start)
            return file.read(-1 if self.stop is None else self.stop - self.start)


@dataclass(frozen=True)
class Corpus:
    """Documents in a fixed order, and a line that says where they come from."""

    source: str
    documents: tuple[Document, ...]

    def digest(self, *settings: object) -> str:
        """SHA-256 over names, split and contents of all documents, and over ``settings``."""
        digest = hashlib.sha256(repr(settings).encode())
        for document in self.documents:
            text = document.read()
            digest.update(repr((document.name, document.held_out, len(text))).encode())
            digest.update(text)
        return digest.hexdigest()


def standard_library(validation_fraction: float) -> Corpus:
    """The running interpreter's own library in source form, without its tests.

    It is real, about 12 MB, and lies on every machine that can run this. It differs from one
    Python release to the next, so compare losses only within one.

    Raises:
        ValueError: if this interpreter came without the sources.
    """
    root = Path(sysconfig.get_path("stdlib"))
    paths = [path for path in root.rglob("*.py") if not _STDLIB_SKIPPED & set(path.relative_to(root).parts)]
    if not paths:
        raise ValueError(
            f"this Python has no library sources under {root}; "
            "give a text of your own: data=text data.path=FILE_OR_FOLDER"
        )
    source = f"standard library of {platform.python_implementation()} {platform.python_version()}"
    return Corpus(source, _split_by_file(root, paths, validation_fraction))


def read_corpus(path: str | Path, pattern: str, validation_fraction: float) -> Corpus:
    """The text at ``path``: one file, or the files under a folder that match ``pattern``.

    Hidden files and files that look binary (a zero byte near the start) are passed over.

    Raises:
        ValueError: if nothing lies at ``path``, or no text does.
    """
    path = Path(path).expanduser()
    if not path.exists():
        raise ValueError(f"data.path={path}: no such file or folder")
    if path.is_file():
        return Corpus(path.name, _split_within_file(path, validation_fraction))
    paths = [found for found in path.glob(pattern) if _is_text(found, path)]
    if not paths:
        raise ValueError(f"data.path={path}: no text file there matches data.pattern={pattern!r}")
    return Corpus(path.name, _split_by_file(path, paths, validation_fraction))


def _is_text(path: Path, root: Path) -> bool:
    if any(part.startswith(".") for part in path.relative_to(root).parts) or not path.is_file():
        return False
    with path.open("rb") as file:
        head = file.read(8192)
    return bool(head) and b"\0" not in head


def _split_by_file(root: Path, paths: list[Path], fraction: float) -> tuple[Document, ...]:
    """Hold out whole files, chosen by the hash of their names: at random, yet always the same."""
    if len(paths) == 1:
        return _split_within_file(paths[0], fraction)
    names = sorted(path.relative_to(root).as_posix() for path in paths)
    shuffled = sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())
    held_out = set(shuffled[: max(1, round(fraction * len(names)))])
    return tuple(Document(name, root / name, held_out=name in held_out) for name in names)


def _split_within_file(path: Path, fraction: float) -> tuple[Document, ...]:
    """Hold out the end of the only file."""
    size = path.stat().st_size
    if size == 0:
        raise ValueError(f"data.path={path}: the file is empty")
    cut = size - max(1, round(fraction * size))
    return (
        Document(path.name, path, held_out=False, stop=cut),
        Document(path.name, path, held_out=True, start=cut),
    )
