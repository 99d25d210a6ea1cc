"""Every legacy key through DeepSpeed's own ``merge_tp_slices`` and through ours: the same files, byte for byte.

The installed DeepSpeed runs always. Other versions are found in the folder ``DEEPSPEED_AFFINE_VERSIONS``, one
importable folder per version (``<folder>/0.16.9/deepspeed``).
"""

import importlib.metadata
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from lowering_cases import KEY, NAME, all_cases, make, replicas
from lowering_reference import rebuild, same_bytes

from deepspeed_affine.lowering import LoweredParam, StockRules, SubParamEntry, UcInfo, lower_param, unused_patterns

HERE = Path(__file__).parent
VERSIONS = ("0.16.9", "0.18.9", "0.19.4", "0.19.6", "0.19.8")
NOT_READ = {"0.16.9": 33, "0.18.9": 33, "0.19.4": 22, "0.19.6": 4, "0.19.8": 0}
"""How many cases each version cannot read or reads wrongly; a change here is a change upstream or in the table."""


def _readable(case, rules):
    able = {
        "uneven": rules.per_rank_shapes,
        "widths": rules.reads_shard_widths,
        "count": rules.normalises_sub_param_shape,
        "absent": rules.skips_absent_states,
        "map": rules.reads_affine_map,
    }
    return all(able[need] for need in case["needs"])


def _sent(case):
    return {key: value for key, value in case.items() if key not in ("full", "needs")}


def _stock(cases, folder, tmp_path):
    torch.save([_sent(case) for case in cases], tmp_path / "cases.pt")
    command = [sys.executable, str(HERE / "stock_merge.py"), str(tmp_path / "cases.pt"), str(tmp_path / "results.pt")]
    path = os.pathsep.join(entry for entry in (folder, os.environ.get("PYTHONPATH")) if entry)
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return torch.load(tmp_path / "results.pt", weights_only=False)


def _our_file(lowered, shards, rules):
    """One universal file as (key, value) pairs; a parameter DeepSpeed averages is averaged as it averages."""
    if lowered.average:
        full = sum(shards) / len(shards)
    else:
        full = rebuild(lowered.map, dict(enumerate(shards)))
    if lowered.truncate_rows is not None:
        full = full[: lowered.truncate_rows]
    entries = [
        (key, ("SubparamShape", value.patterns, value.shape, value.partition_dim))
        if isinstance(value, SubParamEntry)
        else (key, value)
        for key, value in lowered.entries(rules)
    ]
    return [*entries, ("param", full)]


def _typed(value):
    """A value with the type of every container in it, so that a list does not pass for a tuple."""
    if isinstance(value, list | tuple):
        return type(value), [_typed(entry) for entry in value]
    return type(value), value


def _compare(case, stock, rules):
    info = UcInfo.parse(case["info"])
    lowered = lower_param(info, case["name"], case["shapes"], case["tp"])
    assert list(unused_patterns(info, [lowered])) == stock["unmatched"]
    assert set(stock["files"]) == set(case["states"])
    for state, shards in case["states"].items():
        ours, theirs = _our_file(lowered, shards, rules), stock["files"][state]
        assert [key for key, _ in ours] == [key for key, _ in theirs]
        assert _typed([value for _, value in ours[:-1]]) == _typed([value for _, value in theirs[:-1]])
        assert same_bytes(ours[-1][1], theirs[-1][1]), (case["id"], state)
        assert tuple(ours[-1][1].shape) == lowered.stored_shape
        if not lowered.average:
            assert same_bytes(ours[-1][1], case["full"][state]), (case["id"], state)


def _check_version(version, folder, tmp_path):
    cases = all_cases()
    results = _stock(cases, folder, tmp_path)
    assert results["version"].split("+")[0] == version
    rules = StockRules.for_version(version)
    compared = Counter()
    for case in cases:
        if not _readable(case, rules):
            compared["not read"] += 1
            _check_not_read(case, results[case["id"]])
            continue
        assert "error" not in results[case["id"]], (case["id"], results[case["id"]])
        _compare(case, results[case["id"]], rules)
        compared["equal"] += 1
    assert compared["not read"] == NOT_READ[version], compared
    assert compared["equal"] == len(cases) - NOT_READ[version]
    assert compared["equal"] >= 250


def _check_not_read(case, stock):
    """What an older version does with a key it predates: it stops, or (a count taken for a width) writes another F.

    Ours is the F that was cut, whatever is installed.
    """
    lowered = lower_param(case["info"], case["name"], case["shapes"], case["tp"])
    for state, shards in case["states"].items():
        assert same_bytes(rebuild(lowered.map, dict(enumerate(shards))), case["full"][state])
    if "error" not in stock:
        assert case["needs"] == {"count"}
        assert tuple(dict(stock["files"]["fp32"])["param"].shape) != lowered.stored_shape


@pytest.fixture(scope="module")
def installed():
    import deepspeed

    return deepspeed.__version__.split("+")[0]


def test_the_installed_version_writes_what_we_write(installed, tmp_path):
    if installed not in NOT_READ:
        pytest.skip(f"the table of expectations does not know DeepSpeed {installed}")
    _check_version(installed, None, tmp_path)


OTHER_VERSIONS = [version for version in VERSIONS if version != importlib.metadata.version("deepspeed")]


@pytest.mark.real
@pytest.mark.parametrize("version", OTHER_VERSIONS)
def test_every_supported_version_writes_what_we_write(version, tmp_path):
    root = os.environ.get("DEEPSPEED_AFFINE_VERSIONS")
    if not root:
        pytest.skip("DEEPSPEED_AFFINE_VERSIONS is not set")
    folder = Path(root) / version
    if not (folder / "deepspeed").is_dir():
        pytest.skip(f"{folder} holds no importable deepspeed")
    _check_version(version, str(folder), tmp_path)


def _averaged(values, count):
    return sum([values] * count) / count


def _all_mantissas():
    float32 = (torch.arange(1 << 23, dtype=torch.int32) + (127 << 23)).view(torch.float32)
    bfloat16 = (torch.arange(1 << 7, dtype=torch.int16) + (127 << 7)).view(torch.bfloat16)
    return float32, bfloat16


def test_averaging_equal_replicas_keeps_every_value_at_two_and_four_ranks_and_rounds_at_three_and_eight():
    """Every mantissa once; an exponent only moves the point. This is why equal replicas are kept and not summed."""
    for values in _all_mantissas():
        changed = {count: (_averaged(values, count) != values).double().mean().item() for count in (1, 2, 3, 4, 8)}
        assert changed[1] == changed[2] == changed[4] == 0.0
        assert 0.15 < changed[3] < 0.18
        assert 0.45 < changed[8] < 0.48


def test_keeping_equal_replicas_is_what_averaging_writes_at_one_two_and_four_ranks(tmp_path):
    cases = [
        make(f"average-tp{tp}-{dtype}", {"parameter_to_average_patterns": [KEY]}, (64, 64), replicas(tp), dtype=dtype)
        for tp in (1, 2, 4)
        for dtype in (torch.float32, torch.bfloat16)
    ]
    results = _stock(cases, None, tmp_path)
    for case in cases:
        lowered: LoweredParam = lower_param(case["info"], NAME, case["shapes"])
        for state, shards in case["states"].items():
            kept = rebuild(lowered.map, dict(enumerate(shards)))
            assert same_bytes(kept, dict(results[case["id"]]["files"][state])["param"])
