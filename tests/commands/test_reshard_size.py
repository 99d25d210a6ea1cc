"""What resharding a checkpoint of hundreds of megabytes reads, writes and holds, by the kernel's count."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from synthetic import COLUMN, REPLICATED, ROW, Param, World, make, random_full

pytestmark = pytest.mark.heavy

WIDTH, LAYERS = 2048, 3
RUN = """
import sys
from pathlib import Path
from deepspeed_affine.cli import ds_affine
code = ds_affine(sys.argv[1:])
fields = Path("/proc/self/status").read_text() + Path("/proc/self/io").read_text()
print({key: value.split()[0] for key, value in (line.split(":", 1) for line in fields.splitlines()) if value.strip()})
sys.exit(code)
"""
SAMPLED = """
import subprocess, sys, threading
process = subprocess.Popen([sys.executable, "-c", *sys.argv[1:]])
peak = 0
while process.poll() is None:
    try:
        lines = open(f"/proc/{process.pid}/status").read().splitlines()
    except OSError:
        continue
    peak = max(peak, sum(int(x.split()[1]) * 1024 for x in lines if x.startswith(("RssAnon", "RssShmem"))))
    threading.Event().wait(0.003)
print("peak", peak)
sys.exit(process.returncode)
"""


def params() -> list[Param]:
    found = []
    for layer in range(LAYERS):
        for name, shape, cut in (
            ("up", (WIDTH, WIDTH), COLUMN),
            ("down", (WIDTH, WIDTH), ROW),
            ("norm", (WIDTH,), REPLICATED),
        ):
            full = random_full(shape, 3 * layer + len(name))
            found.append(
                Param(f"{layer}.{name}", full, cut, states={"exp_avg": full * 0.5, "exp_avg_sq": full.square()})
            )
    return found


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (World(stage=1, tp=2, dp=2), ["--dp", "3", "--zero-stage", "3"]),
        (World(stage=3, dp=3), ["--dp", "2", "--zero-stage", "1"]),
        (World(stage=1, tp=4), World(stage=2, tp=2, dp=2)),
    ],
    ids=["zero1_to_zero3", "zero3_to_zero1", "tp4_to_tp2"],
)
def test_memory_is_bounded_and_every_byte_is_written_once(
    tmp_path: Path, source: World, target: list[str] | World
) -> None:
    saved = make(source, params()).save(tmp_path / "saved" / "global_step1")
    arguments = target
    if isinstance(target, World):
        small = [Param(each.name, each.full, each.cut) for each in params()]
        like = make(target, small).save(tmp_path / "like" / "global_step1")
        arguments = ["--like", str(like)]
    output = tmp_path / "out" / "global_step1"
    # With checksums, storages that are not read from start to end are read once more for them.
    arguments = [*arguments, "--no-source-crc"]
    command = ["reshard", "--input_folder", str(saved), "--output_folder", str(output), *arguments]
    ran = subprocess.run(
        [sys.executable, "-c", SAMPLED, RUN, *command], check=True, capture_output=True, text=True, timeout=600
    )
    size = sum(path.stat().st_size for path in output.iterdir())
    assert size > 250e6
    text = ran.stdout + ran.stderr
    announced, memory = (float(each) for each in re.findall(r"([\d.]+) MB (?:in|of memory)", text))
    (peak,), (written,), (read,) = (
        map(int, re.findall(pattern, text)) for pattern in (r"peak (\d+)", r"'wchar': '(\d+)'", r"'rchar': '(\d+)'")
    )
    assert peak <= memory * 1e6 < 0.6 * size
    assert written <= 1.01 * size
    # From ZeRO-3 the module's weights are made of the master weights, which are then read twice.
    saved_size = sum(path.stat().st_size for path in Path(saved).iterdir())
    assert announced * 1e6 <= (1.34 if source.stage == 3 else 1.0) * saved_size
    # Python's own modules are read besides.
    assert read <= 1.01 * announced * 1e6 + 30e6
