"""What a direct load of a large checkpoint reads and how much memory it takes, by the kernel's count."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.heavy

SCRIPT = Path(__file__).with_name("direct_run.py")
METADATA = 1 << 20
"""What of a few files is no tensor: their pickles and directories, and the 64 kB in which a directory may begin."""


@pytest.mark.parametrize("pair", ["zero2_tp2_dp2_to_zero3_dp2", "zero3_dp3_to_zero1_tp2", "zero1_tp4_to_zero1_tp2"])
def test_a_rank_reads_what_it_needs_and_holds_little_more_than_its_shard(tmp_path, pair):
    folder = tmp_path / "saved"
    subprocess.run([sys.executable, str(SCRIPT), pair, "save", str(folder)], check=True, cwd=SCRIPT.parents[2])
    size = sum(path.stat().st_size for path in folder.iterdir())
    assert size > 250e6
    command = [sys.executable, str(SCRIPT), pair]
    started = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store"), str(folder)],
            cwd=SCRIPT.parents[2],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    ended = [process.communicate(timeout=600)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0]
    for out in ended:
        figures = json.loads(out.splitlines()[-1])
        print(pair, figures)
        assert figures["wrong"] == []
        assert figures["needed"] < 0.6 * size
        assert figures["read"] <= 1.05 * figures["needed"] + METADATA
        assert figures["extra"] < figures["held"] + 200e6
