"""Code written against DeepSpeed's module runs by changing the import: same names, arguments and builders' results."""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path
from types import ModuleType

import pytest
import torch

from deepspeed_affine import ir
from deepspeed_affine.errors import AffineError, IntegrityError, InvalidMapError


@pytest.fixture(scope="module")
def stock() -> ModuleType:
    """DeepSpeed's module on its own file, because importing the whole of DeepSpeed takes seconds."""
    found = importlib.util.find_spec("deepspeed")
    assert found is not None
    assert found.origin is not None
    path = Path(found.origin).parent / "checkpoint" / "affine.py"
    if not path.exists():
        pytest.skip("this DeepSpeed has no affine maps; 0.19.7 brought them")
    spec = importlib.util.spec_from_file_location("stock_affine", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def arguments(function: object) -> list[str]:
    return list(inspect.signature(function).parameters)  # type: ignore[arg-type]


def test_every_public_name_is_here_with_its_arguments(stock: ModuleType) -> None:
    for name in stock.__all__:
        ours, theirs = getattr(ir, name), getattr(stock, name)
        if callable(theirs):
            assert arguments(ours) == arguments(theirs), name
        else:
            assert ours == theirs, name
    for method in ("rebuild", "extract", "to_dict", "from_dict", "holders", "uncovered_offsets", "validate_coverage"):
        ours, theirs = getattr(ir.ParamAffineMap, method), getattr(stock.ParamAffineMap, method)
        assert arguments(ours)[: len(arguments(theirs))] == arguments(theirs), method


CALLS = {
    "replicated": ("replicated_map", ((3, 4), 3), {"scale": 0.5}),
    "rows": ("contiguous_split_map", ((7, 3), [2, 5], 0), {}),
    "columns": ("contiguous_split_map", ((7, 3), [1, 2, 0], 1), {}),
    "fused": ("sub_param_map", ((10, 2), [6, 4], [[2, 4], [1, 3]], 0), {}),
    "segments": ("segmented_map", ((48, 8), [(32, False), (16, True)], 0, 4, [[8] * 4]), {}),
    "gather": ("block_gather_map", ((8, 32), {0: [0, 2], 1: [1, 3]}, 8, 1), {}),
    "gather a run": ("block_gather_map", ((6, 2), {0: [0, 1], 1: [2]}, 2, 0), {}),
    "empty": ("contiguous_split_map", ((0, 3), [0, 0], 0), {}),
}


@pytest.mark.parametrize("case", CALLS)
def test_builders_say_what_deepspeeds_say(case: str, stock: ModuleType) -> None:
    name, args, named = CALLS[case]
    ours, theirs = getattr(ir, name)(*args, **named), getattr(stock, name)(*args, **named)
    assert ours.to_dict() == theirs.to_dict()
    assert stock.ParamAffineMap.from_dict(ours.canonical().to_dict()).validate_coverage() is None
    full = torch.randn(ours.logical_shape)
    for rank in ours.ranks:
        assert torch.equal(ours.extract(full, rank), theirs.extract(full, rank))
        canonical = stock.ParamAffineMap.from_dict(ours.canonical().to_dict())
        assert torch.equal(canonical.extract(full, rank), ours.extract(full, rank))


def both(stock: ModuleType, shape: tuple[int, ...], shards: dict, rows: dict) -> list:
    """The same map built from DeepSpeed's classes and from ours."""
    return [
        module.ParamAffineMap(
            shape, shards, {rank: [module.AffinePiece(*piece) for piece in row] for rank, row in rows.items()}
        )
        for module in (stock, ir)
    ]


def test_faults_of_deepspeeds_module_are_right_here(stock: ModuleType) -> None:
    theirs, ours = both(stock, (4,), {0: (2,)}, {0: [((2,), 0, (1,), 0, (1,), [0])]})
    assert theirs.rebuild({0: torch.tensor([2, 2])}).shape == (4,)
    with pytest.raises(InvalidMapError):
        ours.rebuild({0: torch.tensor([2, 2])})

    aliased = [((2,), 0, (2,), 0, (2,), [0]), ((2,), 1, (2,), 0, (2,), [0])]
    theirs, ours = both(stock, (4,), {0: (4,)}, {0: aliased})
    theirs.validate_coverage()
    with pytest.raises(InvalidMapError):
        ours.validate_coverage()

    nan = torch.tensor([1.0, float("nan")])
    theirs, ours = stock.replicated_map((2,), 2), ir.replicated_map((2,), 2)
    with pytest.raises(ValueError, match="different data"):
        theirs.rebuild({0: nan, 1: nan.clone()})
    ours.rebuild({0: nan, 1: nan.clone()})

    whole = [((4,), 0, (1,), 0, (1,), [0, 1])]
    halves = [((2,), 0, (1,), 0, (1,), [0, 1]), ((2,), 2, (1,), 2, (1,), [0, 1])]
    theirs, ours = both(stock, (4,), {0: (4,), 1: (4,)}, {0: whole, 1: halves})
    drifted = {0: torch.tensor([1, 2, 3, 4]), 1: torch.tensor([1, 2, 9, 9])}
    assert theirs.rebuild(drifted).tolist() == [1, 2, 9, 9]
    with pytest.raises(IntegrityError):
        ours.rebuild(drifted)

    every_other = torch.arange(8)[::2]
    theirs, ours = stock.contiguous_split_map((4,), [4], 0), ir.contiguous_split_map((4,), [4], 0)
    assert theirs.extract(every_other, 0).tolist() != [0, 2, 4, 6]
    assert ours.extract(every_other, 0).tolist() == [0, 2, 4, 6]

    with pytest.raises(IndexError):
        stock.contiguous_split_map((), [1], 0)
    assert ir.contiguous_split_map((), [1], 0).numel == 1


def test_every_refusal_is_still_a_value_error() -> None:
    assert issubclass(AffineError, ValueError)
