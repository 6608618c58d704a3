"""One specialisation of a CUDA source: the unit that is compiled, cached and launched."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class KernelSource:
    """The kernel `name`, made from the file `file` of this package with `macros` defined.

    The kernel's function in the file is called `KERNEL_NAME`, so that one text can make many names.
    """

    file: str
    name: str
    macros: tuple[tuple[str, int], ...] = ()

    @property
    def text(self) -> str:
        """The source as it is on disk."""
        return (FOLDER / self.file).read_text()

    @property
    def defines(self) -> list[str]:
        """The macros as compiler options, sorted."""
        return [f"-DKERNEL_NAME={self.name}", *(f"-D{key}={value}" for key, value in sorted(self.macros))]


def headers() -> dict[str, str]:
    """The texts of all device headers, by the name that sources include them under."""
    return {path.name: path.read_text() for path in sorted(FOLDER.glob("*.h"))}


def fingerprint(*parts: str) -> str:
    """A name for a cache entry: changes when any of `parts` changes."""
    digest = hashlib.sha256()
    for part in parts:
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.hexdigest()[:40]
