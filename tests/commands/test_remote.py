"""Whole conversions from and to URLs: the bytes of a local one, whatever fails and is run again."""

import json
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from converting import convert
from moments import Moments
from stores import Failing, before_s3_requests
from synthetic import COLUMN, REPLICATED, ROW, ExpertLayer, Param, World, make, random_full

from deepspeed_affine.cli import ds_affine
from deepspeed_affine.storage import remote_sink
from deepspeed_affine.storage.manifest import MANIFEST_NAME

PARAMS = [
    Param("layer.w", random_full((48, 20), 1), COLUMN),
    Param("layer.é [0]*+ &%41", random_full((6, 40), 2), ROW),
    Param("norm", random_full((6,), 3), REPLICATED),
]
EXPERTS = [ExpertLayer("moe.experts", {w: random_full((4, 3, 2), 7) for w in ("w1", "w2", "w3")}, ((0, 1), (2, 3)))]
CASES = {
    "zero1": (World(stage=1, tp=2, dp=2), PARAMS, ()),
    "zero3": (World(stage=3, tp=2, dp=2), PARAMS, ()),
    "experts": (World(stage=1, tp=1, dp=2), PARAMS, EXPERTS),
}


@pytest.fixture
def case(tmp_path):
    return made(tmp_path, "zero1")


def made(tmp_path, name="zero1"):
    """(the folder of a checkpoint, every file of its local conversion)."""
    world, params, experts = CASES[name]
    source = make(world, params, experts).save(tmp_path / "source")
    assert convert(source, tmp_path / "local") == 0
    return source, contents(tmp_path / "local")


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def errors(capsys):
    return capsys.readouterr().err.strip().splitlines()


# The same bytes


@pytest.mark.parametrize("name", list(CASES))
def test_either_side_may_be_elsewhere(store, tmp_path, name):
    source, expected = made(tmp_path, name)
    url = store.copy_in(source)
    assert convert(source, f"{store.url}/to") == 0
    assert store.files("to") == expected
    assert convert(url, tmp_path / "from") == 0
    assert contents(tmp_path / "from") == expected
    assert convert(f"{url}/", f"{store.url}/both/") == 0
    assert store.files("both") == expected
    rest = {name for name in store.files() if name.split("/")[0] not in ("ckpt", "to", "both")}
    assert rest == {"latest_universal"}
    assert store.files()["latest_universal"] == b"both"


def test_objects_of_several_parts(s3, tmp_path):
    size = 2 * remote_sink.PART_BYTES // 4 + 1000
    world, params = World(stage=1, tp=1, dp=2), [Param("w", random_full((size,), 1)), Param("b", random_full((5,), 2))]
    source = make(world, params).save(tmp_path / "source")
    assert convert(source, tmp_path / "local") == 0
    url = s3.copy_in(source)
    s3.requests.clear()
    assert convert(url, f"{s3.url}/out") == 0
    assert s3.files("out") == contents(tmp_path / "local")
    written = [key.rpartition("/out/")[2] for method, key in s3.requests if method == "upload_part"]
    assert all(written.count(f"zero/w/{state}.pt") == 3 for state in ("fp32", "exp_avg", "exp_avg_sq"))


def test_an_output_inside_of_its_input(store, case):
    source, expected = case
    url = store.copy_in(source)
    assert convert(url, f"{url}/universal [1]") == 0
    assert store.files("ckpt/universal [1]") == expected
    assert convert(url, f"{url}/universal [1]", "--overwrite") == 0
    assert store.files("ckpt/universal [1]") == expected


def test_a_dry_run_writes_nothing(store, case):
    url = store.copy_in(case[0])
    before = store.files()
    assert convert(url, f"{store.url}/out", "--dry-run") == 0
    assert store.files() == before


# Existing outputs


def test_the_same_command_again_checks_and_changes_nothing(store, case, capsys):
    source, expected = case
    target = f"{store.url}/out"
    assert convert(source, target) == 0
    store.place.below("latest_universal").delete()
    assert convert(source, target) == 0
    assert store.files() == {**{f"out/{name}": data for name, data in expected.items()}, "latest_universal": b"out"}
    damaged = bytearray(expected["zero/norm/fp32.pt"])
    damaged[-1] ^= 1
    store.write("out/zero/norm/fp32.pt", bytes(damaged))
    capsys.readouterr()
    assert convert(source, target) == 2
    assert "zero/norm/fp32.pt" in errors(capsys)[0]
    assert convert(source, target, "--overwrite") == 0
    assert store.files("out") == expected


def test_what_is_there_is_refused(store, case, capsys):
    source, _ = case
    store.write("out/thesis.txt", b"mine")
    for options in ((), ("--overwrite",)):
        assert convert(source, f"{store.url}/out", *options) == 2
        assert f"{store.url}/out: exists already" in errors(capsys)[0]
    assert store.files() == {"out/thesis.txt": b"mine"}


def test_input_and_output_may_not_be_one(store, case, capsys):
    url = store.copy_in(case[0])
    before = store.files()
    for target in (url, f"{url}/"):
        assert convert(url, target, "--overwrite") == 2
        assert len(errors(capsys)) == 1
    assert store.files() == before


def test_the_other_commands_take_urls(store, case, capsys):
    url, target = store.copy_in(case[0]), f"{store.url}/out"
    assert convert(url, target) == 0
    for arguments in (
        ["inspect", url],
        ["inspect", target],
        ["verify", target],
        ["verify", target, "--against", url],
        ["diff", target, target],
    ):
        assert ds_affine(arguments) == 0, arguments
    damaged = bytearray(store.files("out")["zero/norm/fp32.pt"])
    damaged[damaged.index(b"data/0") + 100] ^= 1
    store.write("out/zero/norm/fp32.pt", bytes(damaged))
    capsys.readouterr()
    assert ds_affine(["verify", target]) == 1
    assert "zero/norm/fp32.pt" in capsys.readouterr().out


# Failures


def test_a_store_that_cannot_be_reached_is_named(store, case, monkeypatch, capsys):
    source, _ = case
    url = store.copy_in(source)
    for name in ("ls", "info", "find", "cat_file"):
        monkeypatch.setattr(store.system, name, Failing(getattr(store.system, name), lambda call, args: True))
    for arguments in ((url, "out"), (source, f"{store.url}/out")):
        assert convert(*arguments) == 2
        (line,) = errors(capsys)
        assert store.url in line
        assert "the line went dead" in line


def test_reads_that_fail_for_good_end_it_and_the_next_run_goes_on(store, case, monkeypatch, capsys):
    source, expected = case
    url = store.copy_in(source)
    target = f"{store.url}/out"
    with monkeypatch.context() as patch:
        written = Failing(store.system.pipe_file, lambda call, args: False)
        read = Failing(store.system.cat_file, lambda call, args: written.calls > 8 and "optim_states" in str(args[0]))
        patch.setattr(store.system, "pipe_file", written)
        patch.setattr(store.system, "cat_file", read)
        patch.setattr("deepspeed_affine.storage.remote_read.BLOCK_BYTES", 256)
        assert convert(url, target, "--workers", "1") == 2
    kept, said = sorted(errors(capsys), key=lambda line: "the same command resumes" not in line)
    assert "the same command resumes" in kept
    assert f"{url}/zero_pp_rank_" in said
    assert "the line went dead" in said
    assert MANIFEST_NAME not in store.files("out")
    assert convert(url, target, "--json") == 0
    assert json.loads(capsys.readouterr().out)["reused_files"] > 0
    assert store.files("out") == expected


def test_reads_that_fail_for_a_while_are_not_seen(store, case, monkeypatch):
    source, expected = case
    url = store.copy_in(source)
    rng = random.Random(1)
    flaky = Failing(store.system.cat_file, lambda call, args: rng.random() < 0.2)
    monkeypatch.setattr(store.system, "cat_file", flaky)
    monkeypatch.setattr("deepspeed_affine.storage.remote.DELAYS", (0.0,) * 12)
    assert convert(url, f"{store.url}/out") == 0
    assert flaky.calls > 20
    monkeypatch.undo()
    assert store.files("out") == expected


@pytest.mark.parametrize("after", [0, 1, 7])
def test_uploads_that_fail_end_it_and_the_next_run_goes_on(store, case, monkeypatch, capsys, after):
    source, expected = case
    target = f"{store.url}/out"
    with monkeypatch.context() as patch:
        fail_uploads(store, patch, after)
        assert convert(source, target, "--workers", "1") == 2
    said = errors(capsys)
    assert [("the line went dead" in line) for line in said].count(True) == 1
    assert any("the same command resumes" in line for line in said) == (after > 0)
    assert len(said) == 1 + (after > 0)
    assert MANIFEST_NAME not in store.files("out")
    assert len(store.files("out")) == after
    assert convert(source, target, "--json") == 0
    assert json.loads(capsys.readouterr().out)["reused_files"] == after
    assert store.files("out") == expected


def fail_uploads(store, monkeypatch, after):
    """Only the first ``after`` files of the output get there."""
    seen = set()

    def fails(key):
        if not any(part in key for part in ("/out/", "/files/", "/uploads/")):
            return False
        seen.add(key)
        return len(seen) > after

    if store.kind == "s3":

        def look(method, options):
            if method == "put_object" and fails(options["Key"]):
                raise ConnectionError("the line went dead")

        before_s3_requests(monkeypatch, look)
        return
    failing = Failing(store.system.pipe_file, lambda call, args: fails(args[0]))
    monkeypatch.setattr(store.system, "pipe_file", failing)


def test_a_source_that_is_bad_leaves_nothing(store, case, capsys):
    source, _ = case
    url = store.copy_in(source)
    name = "zero_pp_rank_1_mp_rank_01_optim_states.pt"
    data = bytearray(store.files("ckpt")[name])
    at = data.index(b"data/0") + 200
    data[at] ^= 1
    store.write(f"ckpt/{name}", bytes(data))
    before = store.files()
    assert convert(url, f"{store.url}/out") == 2
    assert f"{url}/{name}" in errors(capsys)[0]
    assert store.files() == before


def test_another_conversion_does_not_take_over_an_unfinished_one(store, case, monkeypatch, capsys):
    source, expected = case
    target = f"{store.url}/out"
    with monkeypatch.context() as patch:
        fail_uploads(store, patch, 3)
        assert convert(source, target, "--workers", "1") == 2
    capsys.readouterr()
    assert convert(source, target, "--on-drift", "first") == 2
    assert "option on_drift was 'error' and is 'first'" in errors(capsys)[0]
    assert convert(source, target, "--no-resume") == 0
    assert store.files("out") == expected


def test_replacing_fails_before_anything_old_is_touched(store, case, tmp_path, monkeypatch):
    source, expected = case
    target = f"{store.url}/out"
    other = make(World(stage=1, dp=1), [Param("other", random_full((5,), 9))]).save(tmp_path / "other")
    assert convert(other, target) == 0
    old = store.files("out")
    with monkeypatch.context() as patch:
        fail_uploads(store, patch, 5)
        assert convert(source, target, "--overwrite") == 2
    assert store.files("out") == old
    assert convert(source, target, "--overwrite") == 0
    assert store.files("out") == expected


# What has to be installed, and what a user types


def test_a_missing_package_is_one_line(case, capsys, monkeypatch):
    from fsspec.registry import _registry

    monkeypatch.setitem(sys.modules, "gcsfs", None)
    monkeypatch.delitem(_registry, "gs", raising=False)
    for arguments in ((case[0], "gs://a-bucket-nobody-asked-for/out"), ("gs://a-bucket-nobody-asked-for/in", "out")):
        assert convert(*arguments) == 2
        (line,) = errors(capsys)
        assert re.search(r"gs://a-bucket-nobody-asked-for/\w+: .* Run: pip install gcsfs$", line)


@pytest.mark.parametrize("url", ["s3://", "memory://", "unheard-of://x/y", "s3:///x"])
def test_a_url_that_names_nothing_is_one_line(s3_server, case, capsys, url):
    assert convert(case[0], url) == 2
    assert len(errors(capsys)) == 1
    assert convert(url, "out") == 2
    assert len(errors(capsys)) == 1


# Killed, as processes are


def command(source, target, *options):
    code = (
        "import sys; from deepspeed_affine.cli import ds_to_universal; from deepspeed_affine.storage import "
        "remote_journal; remote_journal.BATCH_FILES = 4; sys.exit(ds_to_universal(sys.argv[1:]))"
    )
    folders = ["--input_folder", source, "--output_folder", target]
    return [sys.executable, "-c", code, "--affine", "--json", *folders, *options]


@pytest.mark.heavy
def test_two_processes_share_a_conversion(s3, case):
    source, expected = case
    url, target = s3.copy_in(source), f"{s3.url}/out"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "--no-python"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for options in ([], ["--overwrite", "--no-resume"]):
        run = subprocess.run(
            [*launcher, *command(url, target, *options)], capture_output=True, text=True, env=environment, check=False
        )
        assert run.returncode == 0, run.stderr
        assert s3.files("out") == expected
    assert not [name for name in s3.files() if name.startswith(".out.partial")]


@pytest.mark.heavy
@pytest.mark.parametrize("replacing", [False, True], ids=["fresh", "overwrite"])
def test_killed_at_random_moments_the_same_command_finishes(s3, tmp_path, replacing):
    params = [Param(f"p{index}", random_full((24, 50), index), COLUMN) for index in range(12)]
    source = make(World(stage=1, tp=2, dp=2), params).save(tmp_path / "source")
    other = make(World(stage=1, dp=1), params[:3]).save(tmp_path / "other")
    assert convert(source, tmp_path / "new") == 0
    assert convert(other, tmp_path / "old") == 0
    new, old = contents(tmp_path / "new"), contents(tmp_path / "old")
    url, target = s3.copy_in(source), f"{s3.url}/out"
    options = ["--overwrite"] if replacing else []
    began = time.monotonic()
    subprocess.run(command(url, f"{s3.url}/undisturbed"), check=True, capture_output=True)
    whole = time.monotonic() - began
    moments = Moments(whole)
    killed = reused = 0
    for _ in range(8):
        for path in s3.place.below("out").walk():
            s3.place.below(f"out/{path}").delete()
        if replacing:
            assert convert(other, target) == 0
        with subprocess.Popen(command(url, target, *options), stdout=subprocess.DEVNULL) as process:
            try:
                process.wait(moments.between(0.3, 1.0))
                moments.was_late()
            except subprocess.TimeoutExpired:
                process.kill()
                killed += 1
        found = s3.files("out")
        if MANIFEST_NAME in found:
            assert found in ((new, old) if replacing else (new,))
        with moments.another():
            run = subprocess.run(command(url, target, *options), capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stderr
        reused += json.loads(run.stdout).get("reused_files", 0)
        assert s3.files("out") == new
        assert not [name for name in s3.files() if name.startswith(".out.partial")]
    assert killed >= 4
    assert reused > 0


def test_the_files_of_this_test_are_where_they_were(tmp_path, case):
    """Nothing of a URL is ever taken for a local path."""
    assert {path.name for path in Path(tmp_path).iterdir()} == {"source", "local", "latest_universal"}
    assert not [name for name in os.listdir(".") if "://" in name or name.endswith(":")]
