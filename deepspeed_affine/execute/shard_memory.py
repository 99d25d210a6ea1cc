"""Whether tensors will do as the shards of a plan: how they lie in memory, how large they are, what they share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from deepspeed_affine.errors import AffineError, IntegrityError, InvalidMapError, PolicyError, UnsupportedLayoutError

__all__ = ["multiplies", "overfilled", "sharing", "unfit", "unsound", "unusable"]


def unfit(numel: int, where: str, needed: int, what: str) -> AffineError | None:
    """Why a shard of ``numel`` elements is not what the plan is for; of a source it knows only how far it is read."""
    if what == "source":
        fits, verb = numel >= needed, "reads"
    else:
        fits, verb = numel == needed, "is for"
    if fits:
        return None
    return IntegrityError(f"{where}: has {numel} elements; the plan {verb} {needed}. Give the shard it was made for.")


def overfilled(where: str, *, param: str | None = None, rank: int | None = None) -> AffineError:
    """What to say of a target shard that a plan does not fill once."""
    return InvalidMapError(
        f"{where}: the plan fills some of its addresses twice, or some beyond its end; expected each once. Plan again.",
        param=param,
        rank=rank,
    )


def unsound(where: str, *, param: str | None = None) -> AffineError:
    """What to say of a plan with a segment whose members do not fit together."""
    return InvalidMapError(
        f"{where}: a segment of its plan has numbers below zero, strides that are not one per axis, or a scale that is "
        "no finite number other than zero; expected segments as plan_transfer makes and from_dict reads them.",
        param=param,
    )


def unusable(shard: Any, where: str, written: bool) -> AffineError | None:
    """Why the shard's own memory cannot be sent from or received into."""
    if not isinstance(shard, torch.Tensor) or type(shard).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return UnsupportedLayoutError(
            f"{where}: is a {type(shard).__name__}; expected a plain tensor. Pass the local tensor it stands for."
        )
    if shard.device.type == "meta":
        return UnsupportedLayoutError(f"{where}: is a meta tensor, which has no bytes.")
    plain = shard.layout == torch.strided and not shard.is_quantized and not shard.is_nested
    if not plain or not shard.is_contiguous() or shard.is_conj() or shard.is_neg():
        return UnsupportedLayoutError(
            f"{where}: its elements do not lie one after another in memory (shape {tuple(shard.shape)}, layout "
            f"{shard.layout}); expected a dense tensor, because none is copied as a whole. Pass tensor.contiguous()"
            f"{', and copy back from it afterwards' if written else ''}."
        )
    if written and shard.is_inference() and not torch.is_inference_mode_enabled():
        return UnsupportedLayoutError(
            f"{where}: was made under torch.inference_mode and can be changed only there. Call transfer under it."
        )
    return None


def sharing(flats: Iterable[tuple[str, str, torch.Tensor]]) -> Iterator[AffineError]:
    """Faults of ``(side, whose, dense tensor)`` rows: a target's memory is nothing else's. Sources may share theirs."""
    spans = sorted(
        (flat.data_ptr(), flat.data_ptr() + flat.numel() * flat.element_size(), what, whose)
        for what, whose, flat in flats
        if flat.numel()
    )
    ends: dict[str, tuple[int, str]] = {}
    for start, stop, what, whose in spans:
        for other in ("source", "target"):
            end, holder = ends.get(other, (0, ""))
            if end > start and not what == other == "source":
                spoilt = "the other" if what == other else "what is still to be sent"
                yield PolicyError(
                    f"{whose}: its {what} shard and the {other} shard of {holder} share memory, so that filling one "
                    f"spoils {spoilt}. Give every target memory of its own; of a tied weight plan one name only."
                )
        if stop > ends.get(what, (0, ""))[0]:
            ends[what] = (stop, whose)


def multiplies(dtype: torch.dtype) -> bool:
    """Whether elements of this dtype can be multiplied by a scale."""
    packed = {getattr(torch, name) for name in ("float4_e2m1fn_x2",) if hasattr(torch, name)}
    return (dtype.is_floating_point or dtype.is_complex) and dtype not in packed
