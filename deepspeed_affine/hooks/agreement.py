"""All ranks of a job come to one end: what one of them found wrong, every one raises, and none waits for another."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from deepspeed_affine.errors import SHOWN_FAULTS, AffineError, Faults

__all__ = ["everyone", "together", "union_of_names"]


@contextmanager
def together(about: str, describe: Callable[[Sequence[AffineError]], str] | None = None) -> Iterator[Faults]:
    """Leave the block on every rank of the job, or raise on every rank what any of them raised or noted in it.

    ``about`` is the subject of the one error; ``describe`` makes its first line from the faults. A collective: every
    rank enters the block. What is no AffineError is raised by name; where it happened it is the cause of that error, or
    without ``describe`` raised as it is.
    """
    noted, own = Faults(), None
    try:
        yield noted
    except AffineError as fault:
        noted.add(fault)
    except Exception as error:
        own = error
        noted.add(AffineError(f"{about}: {type(error).__name__}: {error}"))
    rows = everyone([_portable(each) for each in noted])
    if own is not None and describe is None:
        raise own
    found: dict[tuple[str, str], AffineError] = {}
    for row in rows:
        for each in row:
            found.setdefault((type(each).__name__, each.message), each)
    if found:
        raise _one(about, list(found.values()), describe) from own


def everyone(value: Any) -> list[Any]:
    """Every rank's ``value``, in order of ranks; a collective over the whole job, where there is one."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    rows: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rows, value)
    return rows


def union_of_names(names: Iterable[str]) -> set[str]:
    """The names that any rank has; a collective. Ranks with the same names send them once."""
    mine = sorted(set(names))
    digest = hashlib.sha256("\0".join(mine).encode("utf-8", "surrogatepass")).hexdigest()
    rows = everyone(digest)
    if len(set(rows)) == 1:
        return set(mine)
    import torch.distributed as dist

    speaks = rows.index(digest) == dist.get_rank()
    return set().union(*everyone(mine if speaks else []))


def _portable(fault: AffineError) -> AffineError:
    """The fault by itself, as another process can be sent it."""
    return type(fault)(fault.message, param=fault.param, rank=fault.rank, file=fault.file)


def _one(about: str, faults: list[AffineError], describe: Callable[[Sequence[AffineError]], str] | None) -> AffineError:
    if len(faults) == 1 and describe is None:
        return faults[0]
    lines = [describe(faults) if describe is not None else f"{about}: {len(faults)} faults"]
    lines += [fault.message for fault in faults[:SHOWN_FAULTS]]
    if len(faults) > SHOWN_FAULTS:
        lines.append(f"... and {len(faults) - SHOWN_FAULTS} more")
    first = faults[0]
    error = type(first)("\n".join(lines), param=first.param if len(faults) == 1 else None)
    error.faults = tuple(faults)
    return error
