"""Writing and reading what is far larger than the memory they take."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys
import numpy as np
from deepspeed_affine import ninfer


def anonymous():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssAnon")) * 1024


rows, columns, kinds = 65_536, 4096, ("bf16", "fp32", "q4_g64_fp16", "q8_g32_fp16")
peak = 0
specs = [ninfer.TensorSpec(f"w.{kind}", (rows, columns), kind) for kind in kinds]
bindings = {f"p.{kind}": ninfer.Binding(f"w.{kind}") for kind in kinds}
block = np.random.default_rng(1).normal(size=(512, columns)).astype(np.float32)
words = ninfer.round_to_bf16(block)
with ninfer.Writer(sys.argv[1], specs, {"text": ninfer.Component({})}, bindings, max_file_bytes=10**9) as writer:
    for kind in kinds:
        for row in range(0, rows, 512):
            if kind in ("bf16", "fp32"):
                writer.write_elements(f"w.{kind}", row * columns, words if kind == "bf16" else block)
            else:
                writer.write_rows(f"w.{kind}", row, block)
            peak = max(peak, anonymous())
with ninfer.open(sys.argv[1]) as artifact:
    size = artifact.payload_bytes
    for kind in kinds:
        first = None
        for values in artifact.blocks(f"p.{kind}", block.size):
            first = values if first is None else first
            assert np.array_equal(values, first)
            peak = max(peak, anonymous())
    artifact.validate()
    peak = max(peak, anonymous())
print(size, peak)
"""


@pytest.mark.heavy
def test_two_gigabytes_in_less_than_300_mb(tmp_path):
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "big.ninfer")], capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    size, peak = map(int, ended.stdout.split())
    assert size > 2 * 10**9
    assert peak < 300 * 10**6
    print(f"{size} bytes written and read with at most {peak} bytes of anonymous memory")
