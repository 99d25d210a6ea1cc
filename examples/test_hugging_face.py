"""Both Hugging Face examples, run as their own first lines say: train on two processes, convert, resume on one.

pytest examples/test_hugging_face.py
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# Without this DeepSpeed builds a C++ extension for every version and machine, which takes a minute and changes nothing.
RUN = """
import os, runpy, sys
import deepspeed
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
sys.stdout.flush()
sys.stderr.flush()
# DeepSpeed keeps its groups, and a thread of one that drops its last tensor while Python ends aborts the process.
os._exit(0)
"""
CASES = {
    "hf_trainer.py": ("checkpoint-2/global_step2", "checkpoint-2/global_step2_universal"),
    "hf_accelerate.py": ("state/pytorch_model", "universal/pytorch_model"),
}


def run(command: list[str]) -> str:
    path = os.pathsep.join([str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, f"{' '.join(command)}\n{ended.stdout[-2000:]}\n{ended.stderr[-4000:]}"
    return ended.stdout


@pytest.mark.parametrize("example", CASES)
def test_a_run_resumes_on_another_number_of_processes(example: str, tmp_path: Path) -> None:
    starter = tmp_path / "start.py"
    starter.write_text(RUN, encoding="utf-8")

    def losses(verb: str, processes: int) -> dict[str, float]:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        said = run([*launch, str(starter), str(HERE / example), verb, str(tmp_path)])
        line = next(line for line in said.splitlines() if line.startswith('{"losses"'))
        return dict(json.loads(line)["losses"])

    saved, universal = CASES[example]
    trained = losses("train", 2)
    folders = ["--input_folder", str(tmp_path / saved), "--output_folder", str(tmp_path / universal)]
    run([sys.executable, "-m", "deepspeed_affine", "--affine", *folders])
    resumed = losses("resume", 1)
    for step in ("3", "4"):
        assert resumed[step] == pytest.approx(trained[step], rel=1e-4)
        assert trained[step] != pytest.approx(trained["2"], rel=1e-4)
