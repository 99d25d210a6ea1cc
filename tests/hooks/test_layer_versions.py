"""The same laws beside other DeepSpeed versions: every layer they have, described from their own code.

Versions are found in the folder ``DEEPSPEED_AFFINE_VERSIONS``, one importable folder per version. Before 0.19.6 the
layers do not remember what they were cut from, and nothing of the fused layouts is described by DeepSpeed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from live_layers import CASES, GRID

HERE = Path(__file__).parents[1] / "support"
REPOSITORY = HERE.parents[1]

SOURCES = {"0.18.9": {"probe"}, "0.19.4": {"probe"}, "0.19.6": {"metadata", "probe"}}
NOT_BUILT = {"0.18.9": 10, "0.19.4": 10, "0.19.6": 0}
"""How many cases that version's own constructors refuse: sub-parameters that do not divide, and chunks that run out."""

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module", params=sorted(SOURCES))
def version(request):
    root = os.environ.get("DEEPSPEED_AFFINE_VERSIONS")
    folder = Path(root).absolute() / request.param if root else None
    if folder is None or not (folder / "deepspeed").is_dir():
        pytest.skip(f"DEEPSPEED_AFFINE_VERSIONS names no folder with DeepSpeed {request.param}")
    path = os.pathsep.join(
        str(each) for each in (folder, REPOSITORY, HERE, *filter(None, [os.environ.get("PYTHONPATH")]))
    )
    command = [sys.executable, str(HERE / "live_layers.py"), "training"]
    ended = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path, "DS_ACCELERATOR": "cpu"}, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    return request.param, json.loads(ended.stdout.splitlines()[-1])


def test_every_layer_is_described_as_that_version_cuts_it(version):
    name, rows = version
    failed = {case: found for case, found in rows.items() if isinstance(found, str)}
    not_built = {case for case, found in failed.items() if found.startswith("not built")}
    assert {case: found for case, found in failed.items() if case not in not_built} == {}
    assert len(not_built) == NOT_BUILT[name]
    assert {found["source"] for case, found in rows.items() if case not in failed} == SOURCES[name]
    kinds = {CASES[case.partition("/")[0]].kind for case in rows}
    assert len(rows) > 140
    assert len(rows) < len(GRID)
    assert {"Yuan_LinearAllreduce", "fused_LinearLayer", "Conv_LinearALlreduce", "TensorParallelIcShardConv2d"} < kinds


def test_that_versions_converter_gives_f_or_stops_and_the_map_changes_nothing(version):
    """None of these versions reads a map: with it beside their lists the result is what it is without."""
    name, rows = version
    merged = {case: found["merges"] for case, found in rows.items() if not isinstance(found, str)}
    outcomes = {(case, each): what for case, found in merged.items() for each, what in found.items()}
    assert {key: what for key, what in outcomes.items() if what == "WRONG"} == {}
    for (case, each), what in outcomes.items():
        if not each.endswith("!"):
            assert outcomes[case, f"{each}!"] == what, (case, each)
            if CASES[case.partition("/")[0]].map_only and not case.endswith("/1") and "norm" not in each:
                assert what.startswith(("AssertionError", "PolicyError")), (case, each)
    whole = sum(what == "F" for what in outcomes.values())
    assert whole > (700 if name == "0.19.6" else 350 if name == "0.18.9" else 450)
