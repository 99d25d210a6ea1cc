"""Killed at any moment, a write leaves no entry or a complete artifact, and the next run tidies up and completes."""

import json
import subprocess
import sys
from pathlib import Path


def test_killed_before_each_of_its_calls(tmp_path):
    program = [sys.executable, str(Path(__file__).parent / "killed_writer.py"), str(tmp_path)]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    seen = json.loads(ended.stdout)
    assert seen["kills"] > 40
    assert min(seen["nothing"], seen["continuations"], seen["complete"]) > 0
