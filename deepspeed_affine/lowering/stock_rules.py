"""How the DeepSpeed versions differ in what they read from the metadata and write into a universal file."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version

from packaging.version import InvalidVersion, Version

from deepspeed_affine.errors import PolicyError

__all__ = ["NEWEST_KNOWN", "StockRules"]

NEWEST_KNOWN = "0.19.8"


@dataclass(frozen=True, slots=True)
class StockRules:
    """One DeepSpeed's habits, so that a file written here is the file that DeepSpeed would have written.

    F itself never depends on these rules. They decide which entries stand beside it, and they say what the
    installed converter can read at all.
    """

    version: str
    reads_affine_map: bool
    """From 0.19.7: a parameter with a map is written without any of the category entries."""
    normalises_sub_param_shape: bool
    """From 0.19.6: a legacy count at the partition axis is written as a tuple of widths."""
    reads_shard_widths: bool
    """From 0.19.6. Earlier converters ignore the key, divide evenly, and fail in ``view`` if that is wrong."""
    per_rank_shapes: bool
    """From 0.19.4: uneven shards can be converted; earlier, one shape is taken for all ranks."""
    skips_absent_states: bool
    """From 0.19.8: a state nobody saved is skipped; earlier converters fail on the empty list."""

    @classmethod
    def installed(cls) -> StockRules:
        """The rules of the DeepSpeed that is installed, and the newest known where none is."""
        try:
            return cls.for_version(installed_version("deepspeed"))
        except PackageNotFoundError:
            return cls.for_version(NEWEST_KNOWN)

    @classmethod
    def for_version(cls, version: str) -> StockRules:
        """The rules of DeepSpeed ``version``; unknown later versions follow the newest rules known."""
        try:
            parsed = Version(version)
        except InvalidVersion:
            raise PolicyError(
                f"DeepSpeed version {version!r} is not a version number, so what it writes is unknown; "
                "expected something like '0.19.8'."
            ) from None
        release = (parsed.major, parsed.minor, parsed.micro)
        return cls(
            version=version,
            reads_affine_map=release >= (0, 19, 7),
            normalises_sub_param_shape=release >= (0, 19, 6),
            reads_shard_widths=release >= (0, 19, 6),
            per_rank_shapes=release >= (0, 19, 4),
            skips_absent_states=release >= (0, 19, 8),
        )
