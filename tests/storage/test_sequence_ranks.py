"""Only a complete set of data-parallel ranks, of one model rank by its own statement, is taken for sequence ranks."""

import pytest

from deepspeed_affine.storage.folder import parse_name
from deepspeed_affine.storage.sequence_ranks import without_sequence_ranks


def renumbered(places, dp, mp, kind="optim_states"):
    files = [parse_name(f"zero_pp_rank_{d}_mp_rank_{m:02d}_{kind}.pt") for d, m in places]
    without_sequence_ranks(files, dp, mp)
    return [(file.dp, file.mp) for file in files]


@pytest.mark.parametrize("kind", ["optim_states", "model_states"])
def test_every_data_rank_once(kind):
    assert renumbered([(0, 0), (1, 1), (2, 0), (3, 1)], 4, 1, kind) == [(0, 0), (1, 0), (2, 0), (3, 0)]


@pytest.mark.parametrize(
    ("places", "dp", "mp"),
    [
        ([(0, 0), (0, 1), (1, 0), (1, 1)], 2, 1),
        ([(0, 0), (1, 1)], 2, 2),
        ([(0, 0), (1, 1)], 2, None),
        ([(0, 0), (1, 1)], None, 1),
        ([(0, 0), (1, 1)], 3, 1),
        ([(0, 0), (2, 1)], 2, 1),
        ([(0, 0), (1, 1)], 1 << 60, 1),
        ([], 1, 1),
    ],
)
def test_anything_else_keeps_its_ranks(places, dp, mp):
    assert renumbered(places, dp, mp) == places
