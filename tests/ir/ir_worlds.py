"""Seeded generators of small maps: valid ones cut in every way the document can express, and mutated ones."""

from __future__ import annotations

import random

from deepspeed_affine.ir import AffinePiece, ParamAffineMap

Pair = tuple[int, int]
Label = tuple[frozenset[int], float]


def random_map(rng: random.Random, *, max_numel: int = 24, max_ranks: int = 3, whole: bool = True) -> ParamAffineMap:
    """A valid map whose pieces are found by greedily blocking a random relation, so any strides occur."""
    shape = rng.choice([(), (1,), (5,), (6,), (2, 3), (3, 4), (4, 6), (2, 3, 4), (12,), (0,), (3, 0), (4, 4)])
    numel = 1
    for extent in shape:
        numel *= extent
    ranks = list(range(rng.randint(1, max_ranks)))
    labels = [(frozenset(rng.sample(ranks, rng.randint(1, len(ranks)))), rng.choice([1.0, 1.0, 0.5])) for _ in range(3)]
    style = rng.choice(["blocks", "scatter", "stripes"])
    width = rng.randint(1, 4)
    owner: dict[int, Label] = {}
    for offset in range(numel):
        if not whole and rng.random() < 0.2:
            continue
        if style == "blocks":
            owner[offset] = labels[offset * 3 // max(numel, 1)]
        elif style == "stripes":
            owner[offset] = labels[offset // width % 3]
        else:
            owner[offset] = rng.choice(labels)
    shapes: dict[int, tuple[int, ...]] = {}
    pieces: dict[int, list[AffinePiece]] = {}
    for rank in ranks:
        mine = [offset for offset, (locations, _) in owner.items() if rank in locations]
        if rng.random() < 0.3 and mine:
            mine += rng.sample(mine, 1)
        if rng.random() < 0.3:
            rng.shuffle(mine)
        size = len(mine) if whole else len(mine) + rng.randint(0, 3)
        addresses = sorted(rng.sample(range(size), len(mine)))
        shapes[rank] = (size,)
        by_label: dict[Label, list[Pair]] = {}
        for source, dest in zip(mine, addresses, strict=True):
            by_label.setdefault(owner[source], []).append((source, dest))
        pieces[rank] = [piece for label, pairs in by_label.items() for piece in cut(rng, pairs, label[0], label[1])]
    return ParamAffineMap(shape, shapes, pieces)


def cut(rng: random.Random, pairs: list[Pair], locations: frozenset[int], scale: float) -> list[AffinePiece]:
    """Cover the pairs exactly once by random strided blocks of up to three digits, in random order."""
    left = set(pairs)
    found = []
    while left:
        start = rng.choice(sorted(left))
        block, digits = [start], []
        for _ in range(rng.randint(0, 3)):
            other = rng.choice(sorted(left))
            step = (other[0] - start[0], other[1] - start[1])
            if step[0] <= 0 or step[1] <= 0:
                continue
            grown = list(block)
            count = 1
            limit = rng.randint(2, 6)
            while count < limit:
                layer = [(s + count * step[0], d + count * step[1]) for s, d in block]
                if not all(pair in left for pair in layer) or set(layer) & set(grown):
                    break
                grown += layer
                count += 1
            if count > 1:
                block = grown
                digits.append((count, *step))
        left -= set(block)
        if rng.random() < 0.3:
            digits.append((1, rng.randint(0, 9), rng.randint(0, 9)))
        rng.shuffle(digits)
        found.append(
            AffinePiece(
                [d[0] for d in digits],
                start[0],
                [d[1] for d in digits],
                start[1],
                [d[2] for d in digits],
                locations,
                scale,
            )
        )
    if rng.random() < 0.2:
        found.append(AffinePiece((0, 3), 0, (3, 1), 0, (3, 1), locations, scale))
    rng.shuffle(found)
    return found


def recut(rng: random.Random, layout: ParamAffineMap) -> ParamAffineMap:
    """The same relation in other pieces, in another order."""
    pieces = {}
    for rank, row in layout.pieces_by_rank.items():
        by_label: dict[Label, list[Pair]] = {}
        for piece in row:
            pairs = zip(piece.source_offsets(), piece.dest_offsets(), strict=True)
            by_label.setdefault((piece.locations, piece.scale), []).extend(pairs)
        fresh = [piece for label, pairs in by_label.items() for piece in cut(rng, pairs, *label)]
        rng.shuffle(fresh)
        pieces[rank] = fresh
    return ParamAffineMap(layout.logical_shape, layout.shard_shapes, pieces)


def mutated(rng: random.Random, layout: ParamAffineMap) -> tuple[str, dict[int, list[AffinePiece]]] | None:
    """One piece shifted, dropped, duplicated, relabelled, rescaled or resized; None when there is none to change."""
    ranks = [rank for rank in layout.ranks if any(piece.numel for piece in layout.pieces_by_rank[rank])]
    if not ranks:
        return None
    rank = rng.choice(ranks)
    rows = {r: list(row) for r, row in layout.pieces_by_rank.items()}
    at = rng.choice([i for i, piece in enumerate(rows[rank]) if piece.numel])
    piece = rows[rank][at]
    kind = rng.choice(["shift source", "shift dest", "drop", "duplicate", "relabel", "rescale", "resize"])
    fields = {
        "shape": piece.shape,
        "source_offset": piece.source_offset,
        "source_strides": piece.source_strides,
        "dest_offset": piece.dest_offset,
        "dest_strides": piece.dest_strides,
        "locations": piece.locations,
        "scale": piece.scale,
    }
    if kind == "drop":
        del rows[rank][at]
        return kind, rows
    if kind == "duplicate":
        rows[rank].append(piece)
        return kind, rows
    if kind == "shift source":
        fields["source_offset"] = max(0, piece.source_offset + rng.choice([-1, 1, 2]))
    elif kind == "shift dest":
        fields["dest_offset"] = max(0, piece.dest_offset + rng.choice([-1, 1]))
    elif kind == "relabel":
        fields["locations"] = frozenset(rng.sample(layout.ranks, rng.randint(1, len(layout.ranks)))) | {rank}
    elif kind == "rescale":
        fields["scale"] = piece.scale * rng.choice([2.0, -1.0])
    else:
        if not piece.shape:
            return None
        axis = rng.randrange(len(piece.shape))
        if not piece.source_strides[axis] or not piece.dest_strides[axis]:
            return None
        extent = max(0, piece.shape[axis] + rng.choice([-1, 1]))
        fields["shape"] = (*piece.shape[:axis], extent, *piece.shape[axis + 1 :])
    rows[rank][at] = AffinePiece(**fields)  # type: ignore[arg-type]
    return kind, rows
