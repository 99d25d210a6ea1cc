"""``ds_affine verify FOLDER``: any changed bit, any missing or foreign file, and nothing else."""

import os
import random
import subprocess
import sys

import pytest
import torch
from converting import convert
from synthetic import Param, World, make, random_full
from verifying import WORLDS, content, flip_element, made, rewrite_manifest, toggle, verify

from deepspeed_affine.cli import ds_affine
from deepspeed_affine.commands import verify_findings
from deepspeed_affine.errors import CheckpointFormatError
from deepspeed_affine.execute import sampling
from deepspeed_affine.storage.files import ByteReader
from deepspeed_affine.storage.manifest import MANIFEST_NAME, Manifest
from deepspeed_affine.storage.pt_reader import load_pickle

PARAM = "zero/up/exp_avg.pt"


@pytest.fixture
def output(tmp_path):
    """A small output: parameters cut and replicated, an optimizer state, model-state files."""
    world = World(stage=1, tp=2)
    source = make(world, [Param("up", random_full((4, 3), 2)), Param("b", random_full((5,), 5))]).save(tmp_path / "in")
    assert convert(source, tmp_path / "out") == 0
    return tmp_path / "out"


def files_of(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST_NAME)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("options", [(), ("--quick",)])
def test_a_good_folder_is_fine_and_stays_as_it_is(tmp_path, capsys, world, options):
    _, folder = made(tmp_path, world)
    before = content(tmp_path)
    code, found, said = verify(folder, capsys, *options)
    assert (code, found["result"], found["findings"], said) == (0, "fine", [], "")
    assert found["files"] == len(files_of(folder)) == len(Manifest.read(str(folder)).files)
    assert found["bytes"] == sum(path.stat().st_size for path in files_of(folder))
    assert content(tmp_path) == before


def test_what_is_printed(output, capsys):
    assert ds_affine(["verify", str(output)]) == 0
    size = sum(path.stat().st_size for path in files_of(output))
    assert capsys.readouterr().out == (
        f"{output}: fine ({len(files_of(output))} files, {size / 1000:.1f} KB compared with its manifest)\n"
    )
    storage = load_pickle(output / PARAM).archive.storages["0"]
    toggle(output / PARAM, storage.byte_offset + 9, 2)
    os.unlink(output / "zero" / "b" / "fp32.pt")
    (output / "notes.txt").write_text("mine")
    assert ds_affine(["verify", f"{output}/"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{output}: DIFFERENT, 3 files (")
    assert lines[1:] == [
        "  notes.txt           extra    is not listed in the manifest",
        "  zero/b/fp32.pt      missing  is listed in the manifest and not there; parameter 'b', state 'fp32'",
        f"  {PARAM}  damaged  storage '0' (bytes {storage.byte_offset} to {storage.byte_offset + 48} of the file), "
        "which holds ['param']; parameter 'up', state 'exp_avg'",
    ]


def test_a_flip_anywhere_in_any_file_is_found_and_the_file_named(output, capsys):
    """Bits all over every file: data, pickles, headers, padding, directories."""
    generator = random.Random(5)
    tried = 0
    for path in files_of(output):
        name = path.relative_to(output).as_posix()
        size = path.stat().st_size
        data = load_pickle(path).archive.storages.values()
        inside = [ref.byte_offset + generator.randrange(ref.nbytes) for ref in data if ref.nbytes]
        for byte in [0, 30, size - 1, size - 22, *inside, *generator.sample(range(size), 14)]:
            bit = generator.randrange(8)
            toggle(path, byte, bit)
            code, found, _ = verify(output, capsys)
            assert code == 1, (name, byte, bit)
            assert {finding["file"] for finding in found["findings"]} == {name}
            assert {finding["kind"] for finding in found["findings"]} == {"damaged"}
            if byte in inside:
                (finding,) = found["findings"]
                assert finding["detail"].startswith("storage ")
                if name.startswith("zero/") and "optimizer" not in name:
                    assert [finding["param"], f"{finding['state']}.pt"] == name.split("/")[1:]
            toggle(path, byte, bit)
            tried += 1
    assert tried > 200
    assert verify(output, capsys)[0] == 0


def test_every_bit_of_the_manifest_matters(output, capsys):
    path = output / MANIFEST_NAME
    intact = path.read_bytes()
    for byte in range(0, len(intact), 3):
        changed = bytearray(intact)
        changed[byte] ^= 1 << byte % 8
        path.write_bytes(changed)
        code, found, _ = verify(output, capsys)
        assert code == 2, changed[max(0, byte - 20) : byte + 20]
        assert MANIFEST_NAME in found["errors"][0]["message"]


def test_a_manifest_spelled_otherwise_is_told(tmp_path, capsys):
    source = make(World(), [Param("ключ", random_full((4,), 1))]).save(tmp_path / "in")
    assert convert(source, tmp_path / "out") == 0
    path = tmp_path / "out" / MANIFEST_NAME
    data = path.read_bytes()
    assert b"\\u043a" in data
    path.write_bytes(data.replace(b"\\u043a", b"\\u043A", 1))
    code, found, _ = verify(tmp_path / "out", capsys)
    assert (code, [finding["file"] for finding in found["findings"]]) == (1, [MANIFEST_NAME])
    path.write_bytes(data + b"\n")
    assert verify(tmp_path / "out", capsys)[0] == 1


@pytest.mark.parametrize("world", ["zero1", "zero3", "folded"])
def test_files_that_hold_many_tensors_name_the_one(tmp_path, capsys, world):
    """Model-state files and ZeRO-3's optimizer state: which storage, and what it holds."""
    _, folder = made(tmp_path, world)
    seen = 0
    for path in [*folder.glob("*.pt"), folder / "zero" / "optimizer_state.pt"]:
        for key, storage in load_pickle(path).archive.storages.items():
            if not storage.nbytes:
                continue
            toggle(path, storage.byte_offset + storage.nbytes // 2, 6)
            code, found, _ = verify(folder, capsys)
            (finding,) = found["findings"]
            assert code == 1
            assert finding["file"] == path.relative_to(folder).as_posix()
            assert f"storage {key!r} (bytes {storage.byte_offset} to" in finding["detail"]
            assert finding["place"] in finding["detail"]
            assert finding["place"].startswith("[")
            toggle(path, storage.byte_offset + storage.nbytes // 2, 6)
            seen += 1
    assert seen >= 3


def missing(folder):
    os.unlink(folder / PARAM)


def a_folder_in_its_place(folder):
    os.unlink(folder / PARAM)
    os.mkdir(folder / PARAM)


def a_link_to_nothing(folder):
    os.unlink(folder / PARAM)
    os.symlink("nowhere", folder / PARAM)


def cut(folder):
    os.truncate(folder / PARAM, (folder / PARAM).stat().st_size - 1)


def emptied(folder):
    os.truncate(folder / PARAM, 0)


def grown(folder):
    with open(folder / PARAM, "ab") as file:
        file.write(b"\0")


def replaced(folder):
    (folder / PARAM).write_bytes(b"x" * (folder / PARAM).stat().st_size)


def exchanged(folder):
    other = folder / "zero" / "up" / "exp_avg_sq.pt"
    other.rename(folder / "kept")
    (folder / PARAM).rename(other)
    (folder / "kept").rename(folder / PARAM)


def extra_beside(folder):
    (folder / "extra.bin").write_bytes(b"")


def extra_in_zero(folder):
    (folder / "zero" / "up" / "more.pt").write_bytes(b"1")


def extra_deep(folder):
    (folder / "zero" / "a" / "b").mkdir(parents=True)
    (folder / "zero" / "a" / "b" / "fp32.pt").write_bytes(b"1")


@pytest.mark.parametrize(
    ("harm", "kinds", "file"),
    [
        (missing, {"missing"}, PARAM),
        (a_folder_in_its_place, {"missing"}, PARAM),
        (a_link_to_nothing, {"missing"}, PARAM),
        (cut, {"size"}, PARAM),
        (emptied, {"size"}, PARAM),
        (grown, {"size"}, PARAM),
        (replaced, {"damaged"}, PARAM),
        (exchanged, {"damaged", "size"}, PARAM),
        (extra_beside, {"extra"}, "extra.bin"),
        (extra_in_zero, {"extra"}, "zero/up/more.pt"),
        (extra_deep, {"extra"}, "zero/a/b/fp32.pt"),
    ],
)
@pytest.mark.parametrize("options", [(), ("--quick",)])
def test_files_that_are_not_as_listed(output, capsys, harm, kinds, file, options):
    harm(output)
    code, found, said = verify(output, capsys, *options)
    assert code == 1
    assert {finding["kind"] for finding in found["findings"]} <= kinds
    assert file in {finding["file"] for finding in found["findings"]}
    assert "Traceback" not in said


def test_what_nobody_can_tell(output, capsys, monkeypatch):
    """A file that cannot be read is neither right nor wrong; what is found wrong besides decides."""
    original = ByteReader.read_into

    def read_into(self, path, offset, out):
        if path.endswith("exp_avg.pt") and "/up/" in path:
            raise CheckpointFormatError(f"{path}: cannot be read (Input/output error)", file=path)
        original(self, path, offset, out)

    monkeypatch.setattr(ByteReader, "read_into", read_into)
    code, found, _ = verify(output, capsys)
    assert (code, found["result"]) == (2, "cannot tell")
    (finding,) = found["findings"]
    assert (finding["kind"], finding["file"], finding["decided"]) == ("unreadable", PARAM, False)
    assert ds_affine(["verify", str(output)]) == 2
    assert "CANNOT TELL" in capsys.readouterr().out
    extra_beside(output)
    assert verify(output, capsys)[0] == 1


def newer(folder):
    path = folder / MANIFEST_NAME
    path.write_bytes(path.read_bytes().replace(b'"format_version": 1', b'"format_version": 2'))


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda folder: os.unlink(folder / MANIFEST_NAME), "--against the checkpoint"),
        (lambda folder: (folder / MANIFEST_NAME).write_text("{"), "Expecting property name"),
        (newer, "a newer version wrote it"),
    ],
)
@pytest.mark.parametrize("options", [(), ("--quick",)])
def test_without_a_manifest_that_can_be_read_nothing_can_be_told(output, capsys, harm, said, options):
    harm(output)
    code, found, err = verify(output, capsys, *options)
    assert code == 2
    assert said in found["errors"][0]["message"]
    assert str(output / MANIFEST_NAME) in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("folder", ["in", "empty"])
def test_folders_that_are_no_outputs(output, tmp_path, capsys, folder):
    (tmp_path / "empty").mkdir()
    code, found, _ = verify(tmp_path / folder, capsys)
    assert code == 2
    assert MANIFEST_NAME in found["errors"][0]["message"]


@pytest.mark.parametrize("options", [(), ("--quick",), ("--against",)])
def test_a_folder_that_does_not_exist(output, tmp_path, capsys, options):
    options = (*options, str(tmp_path / "in")) if options == ("--against",) else options
    path = tmp_path / "nothing"
    assert ds_affine(["verify", str(path), *options]) == 2
    assert capsys.readouterr().err == f"ds_affine: error: {path}: does not exist. Check the path.\n"
    (tmp_path / ".nothing.partial").mkdir()
    assert ds_affine(["verify", str(path), *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{path}: does not exist; .nothing.partial beside it" in line
    assert "run the same command again, and it resumes" in line
    path.write_text("")
    assert ds_affine(["verify", str(path), *options]) == 2
    assert f"{path}: is a file; expected a folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("",), "FOLDER: is empty"),
        (("x", "--against", ""), "--against: is empty"),
        (("x", "--on-drift", "average"), "--on-drift: says how to compare with a source; give --against"),
        (("x", "--quick", "--no-source-crc", "--deepspeed", "0.19.2"), "--deepspeed and --no-source-crc: says"),
        (("x", "--seed", "1"), "--seed"),
    ],
)
def test_options_that_make_no_sense(capsys, options, said):
    assert ds_affine(["verify", *options]) == 2
    assert said in capsys.readouterr().err


def test_a_rewritten_manifest_vouches_for_what_is_there(output, capsys):
    """Which is why there is ``--against``."""
    flip_element(output / PARAM, 3)
    rewrite_manifest(output)
    assert verify(output, capsys)[0] == 0


def test_every_byte_is_read_once(tmp_path, capsys, monkeypatch):
    _, folder = made(tmp_path, "zero1")
    reads = counted(monkeypatch)
    assert verify(folder, capsys)[0] == 0
    for path in files_of(folder):
        assert sum(length for name, _, length in reads if name == str(path)) == path.stat().st_size


def counted(monkeypatch):
    original, reads = ByteReader.read_into, []

    def read_into(self, path, offset, out):
        reads.append((path, offset, out.nbytes))
        original(self, path, offset, out)

    monkeypatch.setattr(ByteReader, "read_into", read_into)
    return reads


def test_neither_torch_nor_deepspeed_is_needed(output):
    code = (
        "import sys; from deepspeed_affine.cli import ds_affine\n"
        f"code = ds_affine(['verify', {str(output)!r}])\n"
        "sys.exit(code or 10 * any(name in sys.modules for name in ('torch', 'deepspeed')))"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0


def test_many_findings_are_cut_and_all_are_shown_when_asked(output, capsys):
    for number in range(30):
        (output / f"extra{number:02d}").write_text("")
    assert ds_affine(["verify", str(output)]) == 1
    text = capsys.readouterr().out
    assert "extra19" in text
    assert "extra20" not in text
    assert "and 10 more; --all shows them" in text
    assert ds_affine(["verify", str(output), "--all"]) == 1
    assert "extra29" in capsys.readouterr().out


def test_folders_elsewhere(store, output, capsys):
    folder = store.copy_in(output, "checked")
    assert verify(folder, capsys)[0] == 0
    data = bytearray(store.files("checked")[PARAM])
    data[load_pickle(output / PARAM).archive.storages["0"].byte_offset] ^= 1
    store.write(f"checked/{PARAM}", bytes(data))
    store.write("checked/zero/more", b"")
    code, found, _ = verify(folder, capsys)
    assert code == 1
    assert [(each["kind"], each["file"]) for each in found["findings"]] == [
        ("extra", "zero/more"),
        ("damaged", PARAM),
    ]
    assert "storage '0'" in found["findings"][1]["detail"]
    assert found["folder"] == folder


# Samples.


@pytest.fixture
def small_samples(monkeypatch):
    """Folders of a test are large: what would be 64 MB is nothing."""
    monkeypatch.setattr(sampling, "LEAST_BYTES", 1)


def test_a_sample_reads_some_files_and_says_what_that_proves(tmp_path, capsys, monkeypatch, small_samples):
    params = [Param(f"p{number:02d}", random_full((8, 3), number)) for number in range(40)]
    assert convert(make(World(), params).save(tmp_path / "in"), tmp_path / "out") == 0
    files = files_of(tmp_path / "out")
    total = sum(path.stat().st_size for path in files)
    reads = counted(monkeypatch)
    code, found, _ = verify(tmp_path / "out", capsys, "--quick", "--seed", "11")
    sample = found["sample"]
    assert (code, sample["seed"], sample["unit"]) == (0, 11, "group")
    assert sample["single_byte_found"] == sample["chosen"] / sample["units"] < 0.02
    assert sample["missed"]["1%"] == pytest.approx(1 - sample["single_byte_found"], abs=0.02)
    read = {path for path, _, _ in reads if not path.endswith(MANIFEST_NAME)}
    assert len(read) == sample["files"]
    assert sample["bytes"] == sum(os.stat(path).st_size for path in read)
    assert (sample["total_bytes"], found["bytes"]) == (total, sample["bytes"])
    assert sample["bytes"] * 100 >= total
    assert ds_affine(["verify", str(tmp_path / "out"), "--quick", "--seed", "11"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith(
        f"sampled: {sample['chosen']} of {sample['units']} groups of files ({len(read)} of {len(files)} files), "
    )
    assert lines[1].endswith("seed 11 (--seed 11 chooses them again)")
    share = f"{sample['single_byte_found']:.3g}"
    assert lines[2].startswith(
        f"a single damaged byte of the data is found with probability {share}; damage to 1 % of the groups is missed"
    )
    assert lines[2] == found["sample"]["statement"]


def test_no_sample_reads_less_than_it_must(tmp_path, capsys, monkeypatch):
    """Half of the files hold nearly nothing; as many as that chosen at random would hold too little, often enough."""
    params = [Param(f"p{number:02d}", random_full((2000 if number % 2 else 1,), number)) for number in range(60)]
    assert convert(make(World(), params).save(tmp_path / "in"), tmp_path / "out") == 0
    least = 100_000
    monkeypatch.setattr(sampling, "LEAST_BYTES", least)
    for seed in range(15):
        sample = verify(tmp_path / "out", capsys, "--quick", "--seed", str(seed))[1]["sample"]
        assert least <= sample["bytes"] < sample["total_bytes"] / 2
        assert sample["chosen"] < sample["units"] / 3


def test_a_sample_finds_a_damaged_byte_as_often_as_it_says(output, capsys, monkeypatch, small_samples):
    monkeypatch.setattr(sampling, "SHARE", sampling.Fraction(1, 4))
    toggle(output / PARAM, load_pickle(output / PARAM).archive.storages["0"].byte_offset, 3)
    tries, hits, stated = 300, 0, set()
    for seed in range(tries):
        code, found, _ = verify(output, capsys, "--quick", "--seed", str(seed))
        hits += code
        stated.add(found["sample"]["single_byte_found"])
    (probability,) = stated
    assert abs(hits - tries * probability) <= 4 * (tries * probability * (1 - probability)) ** 0.5
    assert 0.2 < probability < 0.4


def test_a_sample_sees_all_sizes_directories_and_pickles(output, capsys, small_samples):
    """Whatever is chosen: names, sizes, zip directories and pickles of every file."""
    for path in files_of(output):
        name = path.relative_to(output).as_posix()
        data = path.read_bytes()
        pickle_at, entry_at = data.index(b"\x80\x02") + 5, data.index(b"PK\x01\x02")
        # The directory's signature, a checksum, a size, a record's name and where it is; the end's own signature.
        for byte in (pickle_at, *(entry_at + place for place in (0, 16, 24, 46, 42)), len(data) - 22):
            toggle(path, byte, 1)
            for seed in range(3):
                code, found, _ = verify(output, capsys, "--quick", "--seed", str(seed))
                assert (code, {each["file"] for each in found["findings"]}) == (1, {name}), byte - entry_at
            toggle(path, byte, 1)


def test_seeds_are_chosen_anew_and_printed(output, capsys, small_samples):
    seeds = {verify(output, capsys, "--quick")[1]["sample"]["seed"] for _ in range(5)}
    assert len(seeds) == 5


def test_probabilities_are_never_rounded_to_certainty():
    assert verify_findings._probability(0.0) == "0"
    assert verify_findings._probability(1.0) == "1"
    assert verify_findings._probability(1 - 1e-9) == "1 - 1e-09"
    assert verify_findings._probability(0.01234) == "0.0123"
    assert verify_findings._probability(1e-30) == "1e-30"


def test_names_of_every_kind_are_printed(tmp_path, capsys):
    name = "layer.\x1b[31m é\n[0]*"
    assert convert(make(World(), [Param(name, torch.ones(3))]).save(tmp_path / "in"), tmp_path / "out") == 0
    path = tmp_path / "out" / "zero" / name / "fp32.pt"
    toggle(path, load_pickle(path).archive.storages["0"].byte_offset)
    code, found, _ = verify(tmp_path / "out", capsys)
    assert (code, found["findings"][0]["param"]) == (1, name)
    assert ds_affine(["verify", str(tmp_path / "out")]) == 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "fp32" in line]
    assert repr(f"zero/{name}/fp32.pt") in line
    assert line.isprintable()


def test_an_output_whose_source_was_not_checked_says_so(tmp_path, capsys):
    source, folder = made(tmp_path, "zero1")
    assert verify(folder, capsys)[1]["notes"] == []
    assert convert(source, tmp_path / "unchecked", "--no-source-crc") == 0
    code, found, _ = verify(tmp_path / "unchecked", capsys)
    assert (code, found["findings"]) == (0, [])
    assert "did not compare its source with the checksums" in found["notes"][0]
