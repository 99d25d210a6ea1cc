"""What the catalogues of attached and of loaded runs have in common. Importable without torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from zlib import crc32

from real_cases import Case

__all__ = ["BF16_OPTIMIZER", "LivePair"]

BF16_OPTIMIZER = {"data_types": {"grad_accum_dtype": "fp32"}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What may be said of a pair beside what it runs."""

    error: str | None = None
    """Where loading must be refused: what is said, as a pattern."""
    stock: bool = False
    """Whether DeepSpeed's own ``load_universal``, without ``attach``, can take what was saved too."""
    environment: str = "installed"
    """``installed``, ``hf5``, or a version of DeepSpeed."""
    quick: bool = False


@dataclass(frozen=True, slots=True)
class LivePair(Facts):
    """A run that saves, and a run that loads; equal topologies must go on as if nothing had happened."""

    name: str
    source: Case
    target: Case

    @property
    def same_topology(self) -> bool:
        return replace(self.source, name="") == replace(self.target, name="")

    def source_folder(self, root: Path) -> Path:
        """Where the saving run is, which pairs share whose sources are the same."""
        return root / "sources" / f"{self.source.name}-{crc32(repr(self.source).encode()):08x}"
