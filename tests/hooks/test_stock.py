"""DeepSpeed's own converter, as it is found, started and reported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from deepspeed_affine.errors import CheckpointFormatError, PolicyError
from deepspeed_affine.hooks import stock


def test_looking_at_the_adapter_imports_neither_deepspeed_nor_torch() -> None:
    script = (
        "import sys; from deepspeed_affine.hooks import stock; stock.installed_version();"
        "import deepspeed_affine.commands.parity, deepspeed_affine.commands.demo;"
        "sys.exit('deepspeed' in sys.modules or 'torch' in sys.modules)"
    )
    root = str(Path(__file__).parent.parent.parent)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    assert subprocess.run([sys.executable, "-c", script], env=environment).returncode == 0


def test_a_plain_folder_links_the_files_and_names_the_folders(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "older").mkdir(parents=True)
    (source / "older" / "a.pt").write_text("nested")
    (source / "a.pt").write_text("a")
    (source / "ü [1].pt").write_text("odd")
    assert stock.plain_folder(source, tmp_path / "plain") == ("older",)
    assert {path.name: path.read_text() for path in (tmp_path / "plain").iterdir()} == {"a.pt": "a", "ü [1].pt": "odd"}
    with pytest.raises(CheckpointFormatError, match="is not a folder"):
        stock.plain_folder(source / "a.pt", tmp_path / "other")


@pytest.mark.parametrize(
    ("path", "plain"),
    [("/a/b-c_d.1/e", True), ("/a/o+x", False), ("/a/b(1)", False), ("/a/b c", False), ("/a/ü", False)],
)
def test_paths_that_are_no_regular_expression_of_themselves_are_known(path: str, plain: bool) -> None:
    assert stock.is_plain_path(path) is plain


def test_an_output_path_deepspeed_would_misread_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="regular expression"):
        stock.convert(tmp_path, tmp_path / "o+x(1)")


def test_a_work_folder_is_made_where_deepspeed_can_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = tmp_path / "o+x"
    odd.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(odd))
    made = stock.plain_workdir()
    try:
        assert stock.is_plain_path(made)
        assert list(odd.iterdir()) == []
    finally:
        os.rmdir(made)


@pytest.mark.parametrize(
    ("log", "message"),
    [
        ("Traceback (most recent call last):\n  File x\n    state['a']\nKeyError: 'exp_avg'\n", "KeyError: 'exp_avg'"),
        ("torch.OutOfMemoryError: big\nleft over\n", "torch.OutOfMemoryError: big"),
        ("killed\n", "killed"),
        ("", "exit code 1 and no output"),
    ],
)
def test_a_failed_run_says_the_exception_it_ended_with(log: str, message: str) -> None:
    assert stock.StockRun(1, "/out", log, 0.1).message == message
    assert stock.StockRun(0, "/out", log, 0.1).message == ""


def test_a_run_that_takes_too_long_is_a_failed_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    (tmp_path / "python").write_text("#!/bin/sh\nexec sleep 30\n")
    (tmp_path / "python").chmod(0o755)
    target = Path(stock.plain_workdir())
    try:
        ran = stock.convert(tmp_path, target / "universal", timeout=0.2)
    finally:
        os.rmdir(target)
    assert (ran.ok, ran.exit_code) == (False, 124)
    assert ran.message == "TimeoutError: no result after 0.2 s"
