"""Shards to full tensor and back, in memory, for every dtype.

Blocks travel as bytes: tensors are viewed as integers of their element size, so that copying needs no arithmetic from
the dtype (fp8 has none) and two replicas are compared as what was stored and not as values (a NaN equals itself).
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import TYPE_CHECKING, Literal

import torch

from deepspeed_affine.errors import IntegrityError, InvalidMapError, UnsupportedLayoutError
from deepspeed_affine.ir.ints import as_integer, coordinates
from deepspeed_affine.ir.piece import AffinePiece

if TYPE_CHECKING:
    from deepspeed_affine.ir.map import ParamAffineMap

__all__ = ["as_words", "dense", "extract", "rebuild", "strided_view", "times", "word_view"]

ScaledStates = Literal["refuse", "power"]

_QUANTIZED = frozenset((torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4))
"""A tensor of these carries a scale beside its numbers; torch ends the process when one is viewed as another dtype."""

_PACKED_FLOATS = frozenset(
    found for found in (getattr(torch, name, None) for name in ("float4_e2m1fn_x2",)) if found is not None
)
"""Two numbers in a byte: copied like any other, but no arithmetic exists for them."""

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's elements in row-major order as one axis, copied only if they are not so already.

    Piece offsets count from the first element. A shard is often a view into a larger storage, or steps through it
    with a stride, so its own offset and strides say nothing about where a piece's elements are.
    """
    _require_tensor(tensor)
    quantized = tensor.is_quantized or tensor.dtype in _QUANTIZED
    if quantized or tensor.is_nested or tensor.layout != torch.strided:
        kind = "quantized" if quantized else "nested" if tensor.is_nested else str(tensor.layout)
        raise UnsupportedLayoutError(
            f"A tensor of dtype {tensor.dtype} is {kind}, so its elements are not one number each at a stride; "
            "expected a dense tensor. Pass its dense form, or the tensors it is made of one by one."
        )
    plain = tensor.detach()
    if tensor.dtype.is_complex:
        return plain.resolve_conj().resolve_neg().contiguous().view(-1)
    # As words, because some dtypes (those below eight bits) have no kernel that copies them.
    words = plain.resolve_neg().view(_WORDS[tensor.element_size()]).contiguous()
    return words.view(-1).view(tensor.dtype)


def _require_tensor(value: object, rank: int | None = None) -> None:
    if not isinstance(value, torch.Tensor):
        raise UnsupportedLayoutError(
            f"{_given(rank)} is a {type(value).__name__}; expected a torch.Tensor.",
            rank=rank,
        )
    if type(value).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise UnsupportedLayoutError(
            f"{_given(rank)} is a {type(value).__name__}, whose elements lie in other tensors; expected a plain "
            "tensor. Pass the local or full tensor it stands for.",
            rank=rank,
        )


def _given(rank: int | None) -> str:
    return "The given tensor" if rank is None else f"The shard of rank {rank}"


def strided_view(tensor: torch.Tensor, shape: tuple[int, ...], offset: int, strides: tuple[int, ...]) -> torch.Tensor:
    """Return ``as_strided`` counted from the tensor's own first element; the tensor must be dense."""
    if not tensor.is_contiguous():
        raise UnsupportedLayoutError(
            f"A tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not dense, so a piece cannot "
            "be a view of it; pass tensor.contiguous()."
        )
    if 0 not in shape:
        last = offset + sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))
        if last >= tensor.numel():
            raise InvalidMapError(f"A piece reaches element {last} of a tensor of {tensor.numel()} elements.")
    return torch.as_strided(tensor, shape, strides, tensor.storage_offset() + offset)


def extract(
    layout: ParamAffineMap,
    full_param: torch.Tensor,
    rank: int,
    scale_power: int = 1,
    *,
    scaled_states: ScaledStates = "refuse",
) -> torch.Tensor:
    """Return rank ``rank``'s shard of the full parameter, every element of it written.

    The shard holds ``full * scale ** scale_power``, rounded once. ``scale_power`` other than 1 (an optimizer state) is
    refused on a map with scaled pieces unless ``scaled_states`` is ``"power"``.
    """
    rank = as_integer(rank, "The rank")
    if rank not in layout.shard_shapes:
        raise InvalidMapError(f"Rank {rank} is not a rank of this map; it has {list(layout.ranks)}.", rank=rank)
    _require_tensor(full_param)
    if full_param.numel() != layout.numel:
        raise InvalidMapError(
            f"The full parameter has {full_param.numel()} elements, but the map describes shape {layout.logical_shape} "
            f"with {layout.numel}."
        )
    layout.validate()
    _check_scales(layout, full_param.dtype, scale_power, scaled_states)
    source = dense(full_param)
    shard = torch.empty(layout.shard_numel(rank), dtype=source.dtype, device=source.device)
    words, shard_words = as_words(source), as_words(shard)
    for piece in layout.pieces_by_rank[rank]:
        if not piece.numel:
            continue
        factor = Fraction(piece.scale) ** scale_power
        if factor == 1:
            _shard_words(shard_words, piece, shard).copy_(_full_words(words, piece, source))
        else:
            block = piece.source_view(source)
            piece.dest_view(shard).copy_(times(block, factor))
    return shard.view(layout.shard_shapes[rank])


def rebuild(
    layout: ParamAffineMap,
    shards: Mapping[int, torch.Tensor],
    scale_power: int = 1,
    *,
    scaled_states: ScaledStates = "refuse",
) -> torch.Tensor:
    """Return the full parameter, after proving that the shards determine every byte of it.

    The map is validated, every rank's shard must be given, and wherever several shard addresses hold one element their
    bytes are compared, however differently the ranks cut the region. A difference is an ``IntegrityError`` that names
    the ranks and the first differing element.
    """
    layout.validate()
    flats = _checked_shards(layout, shards)
    dtype, device = _common_kind(flats)
    if device.type == "meta":
        raise UnsupportedLayoutError(
            "The shards are meta tensors, which have no bytes; expected shards to rebuild from. For the shape alone, "
            "ask the map for logical_shape."
        )
    _check_scales(layout, dtype, scale_power, scaled_states)
    raw = torch.empty(layout.numel, dtype=dtype, device=device)
    raw_words = as_words(raw)
    written = 0
    for rank, flat in flats.items():
        words = as_words(flat)
        for piece in layout.pieces_by_rank[rank]:
            if rank == min(piece.locations) and piece.numel:
                _full_words(raw_words, piece, raw).copy_(_shard_words(words, piece, flat))
                written += piece.numel
    _compare_replicas(layout, flats, raw, repeats=written != layout.numel)
    full = _unscaled(layout, raw, scale_power)
    return full.view(layout.logical_shape)


def _checked_shards(layout: ParamAffineMap, shards: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    if not isinstance(shards, Mapping):
        raise IntegrityError(f"The shards are a {type(shards).__name__}; expected a mapping from rank to tensor.")
    missing = [rank for rank in layout.ranks if rank not in shards]
    if missing:
        raise IntegrityError(
            f"No shard was given for rank {missing[0]}; the map needs ranks {list(layout.ranks)}, "
            f"missing are {missing}.",
            rank=missing[0],
        )
    strangers = [rank for rank in shards if rank not in layout.shard_shapes]
    if strangers:
        raise IntegrityError(
            f"A shard was given for rank {strangers[0]}, which the map does not have; it has {list(layout.ranks)}.",
            rank=strangers[0],
        )
    for rank in layout.ranks:
        _require_tensor(shards[rank], rank)
        expected = layout.shard_numel(rank)
        if shards[rank].numel() != expected:
            raise IntegrityError(
                f"Rank {rank} gave a shard of {shards[rank].numel()} elements, but the map describes {expected}.",
                rank=rank,
            )
    return {rank: dense(shards[rank]) for rank in layout.ranks}


def _common_kind(flats: Mapping[int, torch.Tensor]) -> tuple[torch.dtype, torch.device]:
    if not flats:
        raise IntegrityError("The map has no ranks, so there is no shard to take a dtype from.")
    ranks = list(flats)
    first = flats[ranks[0]]
    for rank in ranks[1:]:
        for what, ours, theirs in (
            ("dtype", flats[rank].dtype, first.dtype),
            ("device", flats[rank].device, first.device),
        ):
            if ours != theirs:
                raise IntegrityError(
                    f"Rank {rank} gave a shard of {what} {ours}, but rank {ranks[0]} gave {theirs}; "
                    f"expected one {what}.",
                    rank=rank,
                )
    return first.dtype, first.device


def _check_scales(layout: ParamAffineMap, dtype: torch.dtype, scale_power: int, scaled_states: ScaledStates) -> None:
    if isinstance(scale_power, bool) or not isinstance(scale_power, int):
        raise InvalidMapError(f"The scale power is {scale_power!r}; expected an integer.")
    if scaled_states not in ("refuse", "power"):
        raise InvalidMapError(f"scaled_states is {scaled_states!r}; expected 'refuse' or 'power'.")
    scaled = next(((rank, piece) for rank, piece in layout.pieces() if piece.scale != 1.0), None)
    if scaled is None:
        return
    rank, piece = scaled
    if scale_power != 1 and scaled_states == "refuse":
        raise UnsupportedLayoutError(
            f"Rank {rank} holds a block times {piece.scale}, and this is an optimizer state (power {scale_power}). It "
            "converts, but lr and eps of its optimizer would still be in the old coordinate, so the resumed run would "
            "diverge without an error. Pass scaled_states='power' to convert it knowingly, or start the state anew.",
            rank=rank,
        )
    if (not (dtype.is_floating_point or dtype.is_complex) or dtype in _PACKED_FLOATS) and scale_power != 0:
        raise UnsupportedLayoutError(
            f"Rank {rank} holds a block times {piece.scale}, which {dtype} cannot carry; expected a floating "
            "dtype of eight bits or more.",
            rank=rank,
        )


def _compare_replicas(
    layout: ParamAffineMap, flats: Mapping[int, torch.Tensor], raw: torch.Tensor, *, repeats: bool
) -> None:
    """Compare every further holder's bytes with the written tensor, in the stored form, before any scaling.

    The lowest rank of each block's locations wrote it, so the written tensor stands for that rank wherever the others
    cut the block. With ``repeats`` a rank holds an element at two addresses, and its own copies are compared too.
    """
    raw_words = as_words(raw)
    width = raw.element_size() // raw_words.element_size()
    first: tuple[int, int, AffinePiece] | None = None
    differing = 0
    for rank, flat in flats.items():
        words = as_words(flat)
        for piece in layout.pieces_by_rank[rank]:
            if not piece.numel or (rank == min(piece.locations) and not repeats):
                continue
            ours = _shard_words(words, piece, flat)
            theirs = _full_words(raw_words, piece, raw)
            if torch.equal(ours, theirs):
                continue
            unequal = (ours != theirs).reshape(piece.numel, width).any(dim=1).nonzero().reshape(-1)
            differing += int(unequal.numel())
            offset = int(_offsets_of(piece, unequal).min())
            if first is None or offset < first[0]:
                first = (offset, rank, piece)
    if first is None:
        return
    offset, rank, piece = first
    reference = min(piece.locations)
    whom = f"Ranks {reference} and {rank} hold" if rank != reference else f"Rank {rank} holds, at two shard addresses,"
    raise IntegrityError(
        f"{whom} different bytes for element {coordinates(offset, layout.logical_shape)} of a parameter of shape "
        f"{layout.logical_shape}, which ranks {sorted(piece.locations)} must hold alike; {differing} compared elements "
        "differ in all.",
        rank=rank,
    )


def _offsets_of(piece: AffinePiece, indices: torch.Tensor) -> torch.Tensor:
    """Offsets into F of the piece's elements with these row-major numbers."""
    offsets = torch.full_like(indices, piece.source_offset)
    for extent, stride in zip(reversed(piece.shape), reversed(piece.source_strides), strict=True):
        offsets += indices % extent * stride
        indices = indices // extent
    return offsets


def _unscaled(layout: ParamAffineMap, raw: torch.Tensor, scale_power: int) -> torch.Tensor:
    """Divide the scaled blocks, reading the stored bytes, so that a block named twice is divided once."""
    scaled = [p for rank, p in layout.pieces() if p.scale != 1.0 and p.numel and rank == min(p.locations)]
    if not scaled or scale_power == 0:
        return raw
    full = raw.clone()
    for piece in scaled:
        piece.source_view(full).copy_(times(piece.source_view(raw), 1 / Fraction(piece.scale) ** scale_power))
    return full


def times(block: torch.Tensor, factor: Fraction) -> torch.Tensor:
    """``block * factor`` with one rounding: by whichever of the factor and its reciprocal a double holds exactly.

    In double precision, because torch would round the factor itself to the block's dtype first. A complex number's two
    parts are multiplied one by one: times a factor made complex an infinity or a NaN would spoil the other part.
    """
    if block.dtype.is_complex:
        parts = torch.view_as_real(block.to(torch.complex128))
        return torch.view_as_complex(times(parts, factor).contiguous()).to(block.dtype)
    wide = block.to(torch.float64)
    try:
        number, reciprocal = float(factor), float(1 / factor)
    except OverflowError:
        raise UnsupportedLayoutError(
            "A block's scale, taken to this power, is beyond what a double can hold; expected a moderate scale."
        ) from None
    if not (number and reciprocal):
        raise UnsupportedLayoutError(
            "A block's scale, taken to this power, rounds to zero in a double; expected a moderate scale."
        )
    product = wide / reciprocal if Fraction(reciprocal) * factor == 1 and Fraction(number) != factor else wide * number
    return product.to(block.dtype)


def as_words(flat: torch.Tensor) -> torch.Tensor:
    """The flat tensor's bytes as integers of the element size (two words for 16-byte elements)."""
    if flat.dtype.is_complex:
        flat = torch.view_as_real(flat).view(-1)
        if flat.element_size() == 4:
            return flat.view(torch.int64)
    return flat.view(_WORDS[flat.element_size()])


def _full_words(words: torch.Tensor, piece: AffinePiece, flat: torch.Tensor) -> torch.Tensor:
    return word_view(words, flat, piece.shape, piece.source_offset, piece.source_strides)


def _shard_words(words: torch.Tensor, piece: AffinePiece, flat: torch.Tensor) -> torch.Tensor:
    return word_view(words, flat, piece.shape, piece.dest_offset, piece.dest_strides)


def word_view(
    words: torch.Tensor, flat: torch.Tensor, shape: tuple[int, ...], offset: int, strides: tuple[int, ...]
) -> torch.Tensor:
    width = flat.element_size() // words.element_size()
    if width > 1:
        shape, offset = (*shape, width), offset * width
        strides = (*[stride * width for stride in strides], 1)
    return strided_view(words, shape, offset, strides)
