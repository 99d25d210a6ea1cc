"""Killed at any moment, a write leaves no entry or a complete artifact, and the next run tidies up and completes."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest


def killed(folder, *arguments):
    program = [sys.executable, str(Path(__file__).parent / "killed_writer.py"), str(folder), *map(str, arguments)]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def test_killed_before_each_of_its_calls(tmp_path):
    seen = killed(tmp_path)
    assert seen["kills"] > 40
    assert min(seen["nothing"], seen["continuations"], seen["complete"]) > 0


@pytest.mark.heavy
def test_killed_at_20_random_moments_and_20_of_publication(tmp_path):
    seed = random.SystemRandom().randrange(2**32)
    print("seed", seed)
    seen = killed(tmp_path, 20, seed)
    print(seen)
    assert seen["kills"] == 40
