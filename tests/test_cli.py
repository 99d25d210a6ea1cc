"""The command line: what it lists, what it imports, how it ends."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "support"))

from converting import convert, listing, wrong
from synthetic import COLUMN, Cut, Param, World, make, random_full

from deepspeed_affine import cli
from deepspeed_affine.commands import convert as command
from deepspeed_affine.execute import bounds, prove

STOCK_OPTIONS = (
    "--input_folder",
    "--output_folder",
    "--num_extract_workers",
    "--num_merge_workers",
    "--keep_temp_folder",
    "--no_strict",
    "--inject_missing_state",
)
OUR_OPTIONS = (
    "--affine",
    "--workers",
    "--dry-run",
    "--on-drift",
    "--scaled-states",
    "--identical-shards",
    "--no-source-crc",
    "--json",
    "--debug",
)
RUN = "import sys; from deepspeed_affine.cli import ds_to_universal as main; "


def python(code, *arguments, **options):
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False, **options
    )


def checkpoint(folder, **world):
    params = [
        Param("emb", random_full((10, 3), 1), Cut("vocab", original_rows=9)),
        Param("up", random_full((4, 3), 2), COLUMN),
    ]
    made = make(World(tp=2, dp=2, **world), params)
    made.save(folder)
    return made


def test_help_lists_every_option_of_both_without_importing_torch(tmp_path):
    report = "\nheavy = [n for n in ('torch', 'deepspeed') if n in sys.modules]; sys.stderr.write(repr(heavy))"
    code = RUN + "\ntry:\n  main(['--help'])\nexcept SystemExit as e:\n  assert e.code == 0" + report
    run = python(code)
    assert run.returncode == 0
    for option in (*STOCK_OPTIONS, *OUR_OPTIONS):
        assert option in run.stdout
    assert run.stderr == "[]"


def test_every_option_of_the_installed_converter_is_ours_too():
    from deepspeed.checkpoint import ds_to_universal as stock

    options = set(re.findall(r"""['"](--\w+)['"]""", Path(stock.__file__).read_text()))
    ours = python(RUN + "main(['--help'])").stdout
    assert len(options) >= 7
    assert [option for option in sorted(options) if option not in ours] == []


def in_one_line(capsys, program):
    """What argparse finds wrong, where it is said in one line with where to read on."""
    (line,) = capsys.readouterr().err.splitlines()
    start, end = f"{program}: error: ", f". See {program} --help."
    assert line.startswith(start)
    assert line.endswith(end)
    return line.removeprefix(start).removesuffix(end)


def test_no_arguments_are_said_in_one_line(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.ds_to_universal([])
    assert ended.value.code == 2
    in_one_line(capsys, "ds_to_universal")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--affine"],
        ["--affine", "--input_folder", "x"],
        ["--affine", "--input_folder", "x", "--output_folder", "y", "--workers", "0"],
        ["--affine", "--input_folder", "x", "--output_folder", "y", "--workers", "many"],
        ["--affine", "--input_folder", "x", "--output_folder", "y", "--on-drift", "guess"],
        ["--affine", "--input_folder", "x", "--output_folder", "y", "--unknown"],
        ["--affine", "--input", "x", "--output", "y"],
    ],
)
def test_wrong_options_are_said_in_one_line(capsys, arguments):
    with pytest.raises(SystemExit) as ended:
        cli.ds_to_universal(arguments)
    assert ended.value.code == 2
    in_one_line(capsys, "ds_to_universal")


@pytest.mark.parametrize(
    "arguments",
    [["--input_folder", "a", "--output_folder", "b"], ["--anything"], ["--input_folder", "affine"], ["x"]],
)
def test_without_affine_the_arguments_go_to_deepspeed_untouched(monkeypatch, arguments):
    from deepspeed_affine.hooks import stock

    seen = []
    monkeypatch.setattr(stock, "hand_over", lambda given: seen.append(list(given)) or 7)
    assert cli.ds_to_universal(arguments) == 7
    assert seen == [arguments]


def test_an_option_deepspeed_refuses_is_answered_with_affine(monkeypatch, capsys):
    from deepspeed_affine.hooks import stock

    monkeypatch.setattr(stock, "hand_over", lambda given: sys.exit(2))
    with pytest.raises(SystemExit) as ended:
        cli.ds_to_universal(["--dry-run"])
    assert ended.value.code == 2
    assert "--affine" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--input_folder", "--output_folder"])
def test_an_empty_path_is_not_the_current_folder(option, tmp_path, capsys):
    folders = {"--input_folder": str(tmp_path / "in"), "--output_folder": str(tmp_path / "out"), option: ""}
    assert cli.ds_to_universal(["--affine", *(each for pair in folders.items() for each in pair)]) == 2
    assert f"{option}: is empty" in capsys.readouterr().err


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_an_output_that_exists_is_refused_before_anything_is_read(tmp_path, capsys, more):
    (tmp_path / "out" / "zero").mkdir(parents=True)
    arguments = ["--affine", "--input_folder", str(tmp_path / "in"), "--output_folder", str(tmp_path / "out"), *more]
    assert cli.ds_to_universal(arguments) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "exists already" in said.err


@pytest.mark.parametrize("arguments", [["--affine", "--input_folder", "a", "--output_folder", "b"], ["--help"], []])
def test_nothing_else_goes_to_deepspeed(monkeypatch, arguments, capsys):
    from deepspeed_affine.hooks import stock

    monkeypatch.setattr(stock, "hand_over", lambda given: pytest.fail(f"handed over {given}"))
    try:
        code = cli.ds_to_universal(arguments)
    except SystemExit as ended:
        code = ended.code
    assert code == (0 if arguments == ["--help"] else 2)


def test_errors_are_lines_and_debug_adds_the_trace(tmp_path, capsys):
    arguments = ["--affine", "--input_folder", str(tmp_path / "absent"), "--output_folder", str(tmp_path / "out")]
    assert cli.ds_to_universal(arguments) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert said.err.startswith("ds_to_universal: error: ")
    assert cli.ds_to_universal([*arguments, "--debug"]) == 2
    said = capsys.readouterr()
    assert "Traceback (most recent call last)" in said.err
    assert "CheckpointFormatError" in said.err


def test_every_missing_file_is_a_line_of_its_own_and_an_entry(tmp_path, capsys):
    made = checkpoint(tmp_path / "in")
    gone = [made.optim_name(1, 0), made.optim_name(0, 1), made.optim_name(1, 1)]
    for name in gone:
        os.unlink(tmp_path / "in" / name)
    assert convert(tmp_path / "in", tmp_path / "out", "--json") == 2
    said = capsys.readouterr()
    assert len(said.err.splitlines()) == 3
    errors = json.loads(said.out)["errors"]
    assert {os.path.basename(error["file"]) for error in errors} == set(gone)
    assert {error["kind"] for error in errors} == {"CheckpointFormatError"}


def test_a_fault_of_our_own_says_so_and_ends_with_two(tmp_path, capsys, monkeypatch):
    checkpoint(tmp_path / "in")
    monkeypatch.setattr(command, "build_plan", lambda *args: {}["missing"])
    assert convert(tmp_path / "in", tmp_path / "out", "--json") == 2
    said = capsys.readouterr()
    assert "internal error, KeyError" in said.err
    assert "Traceback" not in said.err
    assert json.loads(said.out)["errors"][0]["kind"] == "KeyError"


def test_json_describes_the_result(tmp_path, capsys):
    made = checkpoint(tmp_path / "in")
    assert convert(tmp_path / "in", tmp_path / "out", "--json") == 0
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert said.err == ""
    assert found["zero_stage"] == 1
    assert found["degrees"] == {"tp": 2, "pp": 1, "dp": 2}
    assert found["parameters"] == 2
    assert found["states"] == ["exp_avg", "exp_avg_sq", "fp32", "step"]
    assert found["truncated"] == ["emb"]
    assert found["files"] == len([name for name in listing(tmp_path / "out") if name.endswith(".pt")])
    written = sum(os.path.getsize(tmp_path / "out" / n) for n in listing(tmp_path / "out") if n.endswith(".pt"))
    assert found["bytes_written"] == written
    assert found["output_folder"] == str(tmp_path / "out")
    assert wrong(made, tmp_path / "out") == []


@pytest.mark.parametrize("as_json", [True, False])
def test_dry_run_writes_nothing_and_prints_the_plan(tmp_path, capsys, monkeypatch, as_json):
    # What this process holds already says nothing of a conversion.
    monkeypatch.setattr(bounds, "_resident_bytes", lambda: 60 << 20)
    checkpoint(tmp_path / "in")
    before = listing(tmp_path)
    assert convert(tmp_path / "in", tmp_path / "new" / "out", "--dry-run", *(["--json"] if as_json else [])) == 0
    assert listing(tmp_path) == before
    said = capsys.readouterr().out
    if as_json:
        plan = json.loads(said)
        assert "bytes_written" not in plan
        # Every element of every state once: 9 of 10 rows are kept, all 10 are in the files.
        tensors = 3 * 4 * (9 * 3 + 4 * 3)
        model = sum(os.path.getsize(tmp_path / "in" / f"mp_rank_{rank:02d}_model_states.pt") for rank in range(2))
        assert plan["bytes_out"] == tensors + model
        assert plan["bytes_in"] == 3 * 4 * (10 * 3 + 4 * 3) + model
        assert plan["memory_bound_bytes"] < 300 << 20
        assert plan["parameters"] == 2
    else:
        for part in ("2 parameters", "files", " in, ", " out, ", "of memory", "emb keeps 9 of 10 vocabulary rows"):
            assert part in said


def test_dry_run_says_what_would_be_refused(tmp_path, capsys):
    made = checkpoint(tmp_path / "in")
    os.unlink(tmp_path / "in" / made.optim_name(1, 1))
    assert convert(tmp_path / "in", tmp_path / "out", "--dry-run") == 2
    assert made.optim_name(1, 1) in capsys.readouterr().err


def test_dry_run_reads_no_tensor(tmp_path, capsys, monkeypatch):
    made = checkpoint(tmp_path / "in", version=0.3)
    monkeypatch.setattr(prove, "measure_drift", lambda *args: pytest.fail("compared"))
    for name in made.files:
        path = tmp_path / "in" / name
        os.chmod(path, 0o400)
    assert convert(tmp_path / "in", tmp_path / "out", "--dry-run") == 0


@pytest.mark.parametrize("workers", [["--workers", "1"], ["--num_extract_workers", "1", "--num_merge_workers", "1"]])
def test_one_worker_is_enough(tmp_path, workers):
    made = checkpoint(tmp_path / "in")
    assert convert(tmp_path / "in", tmp_path / "out", *workers) == 0
    assert wrong(made, tmp_path / "out") == []


def test_no_progress_bar_without_a_terminal(tmp_path):
    checkpoint(tmp_path / "in")
    folders = ["--input_folder", str(tmp_path / "in"), "--output_folder", str(tmp_path / "out")]
    run = python(RUN + "sys.exit(main())", "--affine", *folders)
    assert run.returncode == 0
    assert run.stderr == ""


def test_a_progress_bar_on_a_terminal(tmp_path):
    import fcntl
    import pty
    import struct
    import termios

    checkpoint(tmp_path / "in")
    master, slave = pty.openpty()
    # A new terminal has no size, and a bar of no width shows nothing.
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
    folders = ["--input_folder", str(tmp_path / "in"), "--output_folder", str(tmp_path / "out")]
    command = [sys.executable, "-c", RUN + "sys.exit(main())", "--affine", *folders]
    run = subprocess.run(command, stderr=slave, stdout=subprocess.PIPE, check=False)
    os.close(slave)
    shown = b""
    while b"100%" not in shown:
        try:
            shown += os.read(master, 1 << 16)
        except OSError:  # the terminal's other end is closed, and all of it has been read
            break
    os.close(master)
    assert run.returncode == 0
    assert b"converting" in shown
    assert b"100%" in shown


def test_the_reader_of_the_output_may_go_away(tmp_path):
    made = checkpoint(tmp_path / "in")
    read, write = os.pipe()
    os.close(read)
    folders = ["--input_folder", str(tmp_path / "in"), "--output_folder", str(tmp_path / "out")]
    command = [sys.executable, "-c", RUN + "sys.exit(main())", "--affine", *folders]
    run = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert run.returncode == 0, run.stderr
    assert wrong(made, tmp_path / "out") == []


def test_conversion_needs_no_deepspeed(tmp_path):
    made = checkpoint(tmp_path / "in")
    code = "import sys; sys.modules['deepspeed'] = None; " + RUN + "code = main(); "
    folders = ["--input_folder", str(tmp_path / "in"), "--output_folder", str(tmp_path / "out")]
    run = python(code + "sys.exit(code)", "--affine", *folders)
    assert run.returncode == 0, run.stderr
    assert wrong(made, tmp_path / "out") == []


@pytest.mark.parametrize("verb", ["verify", "diff", "inspect", "parity"])
def test_what_a_verb_does_not_know_is_said_by_its_own_name(capsys, verb):
    with pytest.raises(SystemExit) as ended:
        cli.ds_affine([verb, "--input_folder" if verb == "parity" else "a", "b", "c", "d"])
    assert ended.value.code == 2
    assert in_one_line(capsys, f"ds_affine {verb}").startswith("unrecognized arguments: ")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["reshard", "--dp", "0"], "'0' is not a number of at least 1"),
        (["reshard", "--zero-stage", "0"], "a checkpoint without ZeRO has no partitions; expected 1, 2 or 3"),
        (["reshard", "--zero-stage", "4"], "'4' is not a stage that can be written; expected 1, 2 or 3"),
        (["diff", "a"], "required"),
        (["ninfer", "inspect"], "required"),
    ],
)
def test_a_wrong_option_of_a_verb_is_one_line(capsys, arguments, said):
    with pytest.raises(SystemExit) as ended:
        cli.ds_affine(arguments)
    assert ended.value.code == 2
    assert said in in_one_line(capsys, " ".join(["ds_affine", *arguments][: 3 if "ninfer" in arguments else 2]))


@pytest.mark.parametrize("number", ["0", "-1", "two"])
def test_a_number_of_workers_is_refused_in_the_same_words_everywhere(capsys, number):
    for main, arguments in (
        (cli.ds_to_universal, ["--affine", "--input_folder", "a", "--output_folder", "b"]),
        (cli.ds_affine, ["verify", "a"]),
        (cli.ds_affine, ["diff", "a", "b"]),
        (cli.ds_affine, ["parity", "--input_folder", "a"]),
    ):
        with pytest.raises(SystemExit) as ended:
            main([*arguments, f"--workers={number}"])
        assert ended.value.code == 2
        said = capsys.readouterr().err
        assert f"error: argument --workers: {number!r} is not a number of at least 1. See " in said
