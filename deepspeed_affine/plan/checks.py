"""Options of planning that are neither maps nor limits, checked, and errors that say what they are about."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from deepspeed_affine.errors import AffineError, PolicyError
from deepspeed_affine.ir.ints import shown

__all__ = ["about", "check_flags", "check_hosts"]


@contextmanager
def about(subject: str, param: str | None = None) -> Iterator[None]:
    """Errors from inside begin with ``subject`` and carry ``param``; their class and rank stay."""
    try:
        yield
    except AffineError as error:
        raise type(error)(f"{subject}: {error}", param=param, rank=error.rank) from error


def check_flags(**flags: object) -> None:
    """All are booleans; PolicyError otherwise, because text such as ``"no"`` would count as true."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise PolicyError(f"{name} is {shown(value)}; expected True or False.")


def check_hosts(hosts: object) -> None:
    """``hosts`` is None or leads from process numbers to machines; PolicyError otherwise."""
    if hosts is None:
        return
    if not isinstance(hosts, Mapping) or set(map(type, hosts)) - {int}:
        raise PolicyError(f"hosts is {shown(hosts)}; expected a mapping from process, an integer, to its machine.")
