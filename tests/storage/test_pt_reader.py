"""Reading .pt files from metadata: torch.load is the oracle for values, zipfile for records."""

import io
import os
import pickle
import random
import shutil
import struct
import subprocess
import sys
import zipfile
import zlib

import pytest
import torch
from fuzzing import same_content
from stored import load_tensor

from deepspeed_affine.errors import AffineError, CheckpointFormatError, PolicyError
from deepspeed_affine.storage.dtypes import ITEM_SIZES
from deepspeed_affine.storage.pt_reader import load_pickle
from deepspeed_affine.storage.refs import Global, StandIn, TensorRef, TorchSize

SAVABLE = [
    name
    for name in ITEM_SIZES
    if isinstance(getattr(torch, name, None), torch.dtype)
    and not name.startswith(("q", "bits"))
    and name.removeprefix("u").removeprefix("int") not in set("1234567")
]


def raw(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


@pytest.mark.parametrize("name", SAVABLE)
def test_every_dtype_is_read_in_place(tmp_path, name):
    dtype = getattr(torch, name)
    assert ITEM_SIZES[name] == dtype.itemsize
    whole = torch.randint(0, 2, (24 * dtype.itemsize,), dtype=torch.uint8).view(dtype).view(4, 6)
    if name == "float4_e2m1fn_x2":
        original = {"x": whole}
    else:
        original = {"x": whole, "t": whole.t(), "part": whole[1:, 2:5], "none": whole[:0], "one": whole[0, 0]}
    path = tmp_path / "x.pt"
    torch.save(original, path)
    got = load_pickle(path).root
    loaded = torch.load(path, weights_only=False)
    assert list(got) == list(original)
    for key, expected in loaded.items():
        tensor = load_tensor(got[key])
        assert (tensor.dtype, tensor.shape, tensor.stride()) == (dtype, expected.shape, expected.stride())
        assert got[key].dtype == name
        assert raw(tensor) == raw(expected)
        assert got[key].is_contiguous == expected.is_contiguous()
        assert got[key].nbytes == expected.numel() * dtype.itemsize


def test_offsets_and_checksums_are_those_of_the_file(tmp_path):
    path = tmp_path / "x.pt"
    shared = torch.arange(40, dtype=torch.float32)
    torch.save({"a": shared[4:20], "b": shared.view(8, 5)[:, 1:3], "c": torch.ones(3, dtype=torch.bfloat16)}, path)
    loaded = load_pickle(path)
    data = path.read_bytes()
    assert loaded.root["a"].storage is loaded.root["b"].storage
    assert set(loaded.archive.storages) == {"0", "1"}
    assert loaded.archive.file_size == len(data)
    assert loaded.archive.has_crc
    for storage in loaded.archive.storages.values():
        content = data[storage.byte_offset : storage.byte_offset + storage.nbytes]
        assert zlib.crc32(content) == storage.crc32
        assert zipfile.ZipFile(path).read(f"x/data/{storage.key}") == content
    a = loaded.root["a"]
    assert data[a.byte_offset : a.byte_offset + a.nbytes] == shared[4:20].numpy().tobytes()


def test_parameters_meta_tensors_sizes_and_attributes(tmp_path):
    path = tmp_path / "x.pt"
    marked = torch.ones(3)
    marked.ds_id = 7
    parameter = torch.nn.Parameter(torch.ones(2), requires_grad=True)
    with_state = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    with_state.tag = "t"
    torch.save(
        {
            "p": parameter,
            "s": with_state,
            "m": torch.empty(3, 2, device="meta", dtype=torch.int32),
            "size": torch.Size([2, 3]),
            "marked": marked,
            "g": torch.ones(1, requires_grad=True),
            "dtype": torch.bfloat16,
            "device": torch.device("cuda:1"),
        },
        path,
    )
    got = load_pickle(path).root
    assert (got["p"].parameter, got["p"].requires_grad, got["p"].state) == (True, True, None)
    assert (got["s"].parameter, got["s"].requires_grad, got["s"].state) == (True, False, {"tag": "t"})
    assert (got["m"].is_meta, got["m"].shape, got["m"].dtype, got["m"].numel) == (True, (3, 2), "int32", 6)
    assert type(got["size"]) is TorchSize
    assert got["size"] == (2, 3)
    assert (got["marked"].parameter, got["marked"].state) == (False, {"ds_id": 7})
    assert got["g"].requires_grad
    assert not got["g"].parameter
    assert got["dtype"] == Global("torch", "bfloat16")
    assert got["device"].stand_in_args == ("cuda", 1)
    assert load_tensor(got["m"]).device.type == "meta"
    assert torch.equal(load_tensor(got["marked"]), torch.ones(3))


def test_tensors_whose_bytes_are_not_their_values_stay_stand_ins(tmp_path):
    path = tmp_path / "x.pt"
    conjugate = torch.ones(3, dtype=torch.complex64).conj()
    sparse = torch.eye(3).to_sparse()
    torch.save({"conj": conjugate, "sparse": sparse}, path)
    got = load_pickle(path).root
    assert isinstance(got["conj"], StandIn)
    assert isinstance(got["sparse"], StandIn)


def test_references_travel_to_spawned_workers(tmp_path):
    path = tmp_path / "x.pt"
    torch.save({"a": torch.ones(3)}, path)
    loaded = load_pickle(path)
    again = pickle.loads(pickle.dumps(loaded))
    assert again.root == loaded.root
    assert again.archive.storages == loaded.archive.storages
    assert hash(again.root["a"]) == hash(loaded.root["a"])


def test_reading_needs_no_torch(tmp_path):
    path = tmp_path / "x.pt"
    torch.save({"a": torch.ones(3)}, path)
    code = (
        "import sys; from deepspeed_affine.storage.pt_reader import load_pickle; "
        "from deepspeed_affine.storage.folder import scan_folder; from deepspeed_affine.storage import pt_writer; "
        f"print(load_pickle({str(path)!r}).root['a'].shape); assert 'torch' not in sys.modules, 'torch'; "
        "assert 'numpy' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "(3,)", done.stderr


def test_names_with_spaces_brackets_and_accents(tmp_path):
    folder = tmp_path / "ö [x] + (1)"
    folder.mkdir()
    path = folder / "é {a}.pt"
    torch.save({"a": torch.ones(3)}, path)
    ref = load_pickle(path).root["a"]
    assert torch.equal(load_tensor(ref), torch.ones(3))


def test_checksums_that_were_never_written_are_none(tmp_path):
    path = tmp_path / "x.pt"
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": torch.ones(3), "b": torch.ones(0)}, path)
    finally:
        torch.serialization.set_crc32_options(True)
    loaded = load_pickle(path)
    assert loaded.root["a"].storage.crc32 is None
    assert not loaded.archive.has_crc


def rewrite(source, target, change, compression=zipfile.ZIP_STORED):
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", compression) as new:
        for name in old.namelist():
            data = change(name.split("/", 1)[1], old.read(name))
            if data is not None:
                new.writestr(name, data)


@pytest.fixture
def good(tmp_path):
    path = tmp_path / "good.pt"
    torch.save({"a": torch.arange(30.0), "b": [torch.ones(2, 3), 5]}, path)
    return path


def refused(path, match):
    with pytest.raises(CheckpointFormatError, match=match) as caught:
        load_pickle(path)
    assert caught.value.file == str(path)
    assert str(path) in caught.value.message


def test_files_torch_save_did_not_write_are_refused_with_what_to_do(good, tmp_path):
    bad = tmp_path / "bad.pt"
    rewrite(good, bad, lambda _, data: data, zipfile.ZIP_DEFLATED)
    refused(bad, r"compressed.*torch\.save\(torch\.load")
    rewrite(good, bad, lambda name, data: b"big" if name == "byteorder" else data)
    refused(bad, "byte order is 'big'")
    rewrite(good, bad, lambda name, data: None if name == "data/1" else data)
    refused(bad, "storage '1'.*no record")
    rewrite(good, bad, lambda name, data: data[:-4] if name == "data/0" else data)
    refused(bad, "30 elements of float32.*116 bytes")
    rewrite(good, bad, lambda name, data: None if name == "data.pkl" else data)
    refused(bad, "data.pkl")
    torch.save({"a": torch.ones(2)}, bad, _use_new_zipfile_serialization=False)
    refused(bad, r"before torch 1\.6.*torch\.save")
    # In a process of its own: a DeepSpeed engine made by another test changes what torch.nn does in this one.
    script = "import sys, torch; torch.jit.script(torch.nn.Linear(2, 2)).save(sys.argv[1])"
    subprocess.run([sys.executable, "-c", script, str(bad)], check=True)
    refused(bad, "TorchScript")
    bad.write_bytes(b"")
    refused(bad, "empty")
    bad.write_bytes(b"hello world")
    refused(bad, "hello|hell")
    refused(tmp_path / "nothing.pt", "cannot be opened")
    refused(tmp_path, "no regular file")


def test_files_without_the_newer_records_are_read(good, tmp_path):
    old = tmp_path / "old.pt"
    rewrite(good, old, lambda name, data: data if name == "data.pkl" or name.startswith("data/") else None)
    assert load_pickle(old).root["a"].shape == (30,)


def test_views_outside_their_storage_are_refused(good, tmp_path):
    data = zipfile.ZipFile(good).read("good/data.pkl")
    bad = tmp_path / "bad.pt"
    for found, wrong in ((b"K\x1e\x85", b"K\x1f\x85"), (b"QK\x00K\x1e", b"QK\x01K\x1e")):
        assert found in data
        rewrite(good, bad, lambda name, d, f=found, w=wrong: d.replace(f, w) if name == "data.pkl" else d)
        refused(bad, "reads element 30")


def test_every_truncation_is_a_clean_refusal(good, tmp_path):
    data = good.read_bytes()
    bad = tmp_path / "bad.pt"
    for length in range(len(data)):
        bad.write_bytes(data[:length])
        with pytest.raises(CheckpointFormatError) as caught:
            load_pickle(bad)
        assert caught.value.file == str(bad)


def test_flipped_bytes_are_refused_or_change_no_metadata(good, tmp_path):
    data = good.read_bytes()
    bad = tmp_path / "bad.pt"
    rng = random.Random(3)
    expected = load_pickle(good).root
    refusals = 0
    for at in range(len(data)):
        broken = bytearray(data)
        broken[at] ^= 1 << rng.randrange(8)
        bad.write_bytes(broken)
        try:
            got = load_pickle(bad).root
        except AffineError:
            refusals += 1
            continue
        for ref, want in ((got["a"], expected["a"]), (got["b"][0], expected["b"][0])):
            assert isinstance(ref, TensorRef)
            assert (ref.shape, ref.byte_offset, ref.dtype) == (want.shape, want.byte_offset, want.dtype)
    assert refusals > 400


def test_a_directory_that_lies_about_sizes_does_not_fool_the_reader(good, tmp_path):
    data = bytearray(good.read_bytes())
    at = data.rfind(b"PK\x01\x02", 0, data.find(b"good/data/0", data.find(b"PK\x01\x02")))
    for field in (20, 24):
        struct.pack_into("<L", data, at + field, 1 << 30)
    bad = tmp_path / "bad.pt"
    bad.write_bytes(data)
    refused(bad, "does not fit")


def test_a_zip_of_another_kind_of_writer_with_64_bit_fields(good, tmp_path):
    path = tmp_path / "z64.pt"
    with zipfile.ZipFile(good) as old, zipfile.ZipFile(path, "w") as new:
        for name in old.namelist():
            with new.open(name, "w", force_zip64=True) as record:
                record.write(old.read(name))
    ref = load_pickle(path).root["a"]
    assert torch.equal(load_tensor(ref), torch.arange(30.0))


def test_hostile_file_converts_or_is_refused_without_running(tmp_path):
    target = tmp_path / "made"

    class Gadget:
        def __reduce__(self):
            return (__import__("os").system, (f"touch {target}",))

    path = tmp_path / "x.pt"
    torch.save({"a": torch.ones(2), "bad": Gadget()}, path)
    torch.load(path, weights_only=False)
    assert target.exists()
    target.unlink()
    got = load_pickle(path).root
    assert got["a"].shape == (2,)
    assert got["bad"].stand_in_args == (f"touch {target}",)
    assert not target.exists()


def test_a_copy_elsewhere_reads_the_same(good, tmp_path):
    copied = tmp_path / "renamed.pt"
    shutil.copy2(good, copied)
    buffer = io.BytesIO(copied.read_bytes())
    assert zipfile.ZipFile(buffer).namelist()[0] == "good/data.pkl"
    assert load_pickle(copied).root["a"].byte_offset == load_pickle(good).root["a"].byte_offset


def test_a_pipe_is_refused_without_waiting_for_its_writer(tmp_path):
    pipe = tmp_path / "x.pt"
    os.mkfifo(pipe)
    with pytest.raises(CheckpointFormatError, match="no regular file"):
        load_pickle(pipe)


def test_a_path_no_system_has_is_refused(tmp_path):
    with pytest.raises(PolicyError, match="NUL"):
        load_pickle(f"{tmp_path}/a\0b")


def saved_with_tensor(path):
    torch.save({"a": torch.arange(6.0), "b": torch.zeros(2)}, path)
    return path.read_bytes()


@pytest.mark.parametrize(
    "record", ["version", "byteorder", ".format_version", ".storage_alignment", "serialization_id"]
)
@pytest.mark.parametrize("where", ["directory", "header", "content"])
def test_records_that_the_pickle_does_not_name_are_checked_too(tmp_path, record, where):
    """Such a file may be copied as it is, and torch has to load the copy."""
    path = tmp_path / "x.pt"
    data = bytearray(saved_with_tensor(path))
    with zipfile.ZipFile(path) as archive:
        info = next(info for info in archive.infolist() if info.filename.endswith(record))
    name = info.filename.encode()
    if where == "directory":
        data[data.rindex(name) + len(name) - 1] ^= 0x20
    elif where == "header":
        data[info.header_offset + 30 + len(name) - 1] ^= 0x20
    else:
        extra = int.from_bytes(data[info.header_offset + 28 : info.header_offset + 30], "little")
        data[info.header_offset + 30 + len(name) + extra] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointFormatError, match=r"x\.pt"):
        load_pickle(path)


@pytest.mark.parametrize(("signature", "at"), [(b"PK\x05\x06", 4), (b"PK\x05\x06", 6), (b"PK\x05\x06", 8)])
def test_an_archive_of_several_volumes_is_refused(tmp_path, signature, at):
    path = tmp_path / "x.pt"
    data = bytearray(saved_with_tensor(path))
    data[data.rindex(signature) + at] += 1
    path.write_bytes(data)
    with pytest.raises(CheckpointFormatError, match="volumes"):
        load_pickle(path)


@pytest.mark.parametrize("at", [16, 20, 24])
def test_a_64_bit_end_of_several_volumes_is_refused(tmp_path, at):
    path = tmp_path / "x.pt"
    data = bytearray(saved_with_tensor(path))
    data[data.rindex(b"PK\x06\x06") + at] += 1
    path.write_bytes(data)
    with pytest.raises(CheckpointFormatError, match="volumes"):
        load_pickle(path)


@pytest.mark.parametrize(("at", "bit"), [(34, 1), (34, 0x80), (35, 1), (38, 0x10)])
def test_a_record_that_torch_would_not_find_is_refused(tmp_path, at, bit):
    path = tmp_path / "x.pt"
    data = bytearray(saved_with_tensor(path))
    entry = data.index(b"PK\x01\x02")
    while entry >= 0:
        changed = bytearray(data)
        changed[entry + at] ^= bit
        path.write_bytes(changed)
        with pytest.raises(CheckpointFormatError, match="of volume"):
            load_pickle(path)
        entry = data.find(b"PK\x01\x02", entry + 4)


@pytest.mark.parametrize("flag", [0x1, 0x20, 0x40, 0x2000])
def test_a_record_that_is_not_stored_as_it_was_saved_is_refused(tmp_path, flag):
    path = tmp_path / "x.pt"
    data = bytearray(saved_with_tensor(path))
    at = data.index(b"PK\x01\x02") + 8
    data[at : at + 2] = (int.from_bytes(data[at : at + 2], "little") | flag).to_bytes(2, "little")
    path.write_bytes(data)
    with pytest.raises(CheckpointFormatError, match="encrypted"):
        load_pickle(path)


def flipped_bits_outside_content(tmp_path, step, offset=0):
    """How many flips of one bit of the archive's own records are taken; torch makes the same of each of those."""
    path = tmp_path / "mp_rank_00_model_states.pt"
    torch.save({"module": {"w": torch.arange(6.0), "n": torch.zeros(0)}, "steps": 3}, path)
    intact = path.read_bytes()
    content = set()
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            name, extra = struct.unpack_from("<2H", intact, info.header_offset + 26)
            start = info.header_offset + 30 + name + extra
            content.update(range(start, start + info.file_size))
    places = [(at, bit) for at in range(len(intact)) if at not in content for bit in range(8)]
    taken = 0
    for at, bit in places[offset::step]:
        changed = intact[:at] + bytes([intact[at] ^ 1 << bit]) + intact[at + 1 :]
        path.write_bytes(changed)
        try:
            load_pickle(path)
        except CheckpointFormatError:
            continue
        taken += 1
        assert same_content(changed, intact), (at, bit)
    return taken


def test_what_is_taken_of_a_damaged_archive_torch_takes_too(tmp_path):
    assert flipped_bits_outside_content(tmp_path, 23) > 50


@pytest.mark.heavy
def test_what_is_taken_of_any_damaged_archive_torch_takes_too(tmp_path):
    assert flipped_bits_outside_content(tmp_path, 1) > 1000
