"""Written files are torch.save's, whole and byte for byte; torch.load, zipfile and unzip accept them."""

import collections
import io
import pickle
import shutil
import subprocess
import sys
import threading
import types
import zipfile
import zlib

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stored import LaidOutFile

from deepspeed_affine.errors import InvalidMapError, UnsupportedLayoutError
from deepspeed_affine.storage.crc import crc32_combine, crc32_of_zeros
from deepspeed_affine.storage.pt_reader import load_pickle
from deepspeed_affine.storage.pt_writer import NewTensor, PlacedStorage, PtLayout, archive_name
from deepspeed_affine.storage.refs import StorageRef, TensorRef, new_instance


def placeholders(value, found):
    """The same object with a placeholder for every tensor; ``found`` collects the tensors in pickling order."""
    if isinstance(value, torch.Tensor):
        made = NewTensor(str(value.dtype).removeprefix("torch."), tuple(value.shape), value.requires_grad)
        found[id(made)] = (value, made)
        return made
    if isinstance(value, dict):
        return type(value)((key, placeholders(item, found)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return type(value)(placeholders(item, found) for item in value)
    return value


def bytes_of(tensor):
    tensor = tensor.detach().contiguous()
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def front_to_back(layout, data_of):
    """The file as a writer that cannot seek makes it; ``data_of`` returns the bytes of a placed storage."""
    written, crcs = b"", {}
    for part in layout.sequence(crcs):
        if isinstance(part, PlacedStorage):
            assert part.byte_offset == len(written)
            data = data_of(part)
            crcs[part.key] = zlib.crc32(data)
            written += data
        else:
            written += part
    assert len(written) == layout.file_size
    return written


def write(path, root, found):
    layout = PtLayout(root, archive_name(path))
    crcs = {}
    with LaidOutFile(path, layout) as writer:
        for placed in reversed(layout.storages):
            tensor = found[id(placed.tensor)][0]
            data = bytes_of(tensor)
            assert (placed.nbytes, placed.source) == (len(data), None)
            assert placed.byte_offset % 64 == 0
            for start in reversed(range(0, len(data), 7000)):
                writer.write(placed.key, start, data[start : start + 7000])
            crcs[placed.key] = zlib.crc32(data)
        writer.finish(crcs)
    assert path.stat().st_size == layout.file_size
    assert front_to_back(layout, lambda placed: bytes_of(found[id(placed.tensor)][0])) == path.read_bytes()
    segments = [*layout.header(), *layout.trailer(crcs), *((p.byte_offset, bytes(p.nbytes)) for p in layout.storages)]
    end = 0
    for offset, data in sorted(segments):
        assert offset == end or not data
        end = max(end, offset + len(data))
    assert end == layout.file_size
    return layout


def assert_equal_to_torch(tmp_path, value, name="fp32.pt"):
    (tmp_path / "torch").mkdir(exist_ok=True)
    (tmp_path / "ours").mkdir(exist_ok=True)
    expected, path = tmp_path / "torch" / name, tmp_path / "ours" / name
    torch.save(value, expected)
    path.unlink(missing_ok=True)
    found = {}
    write(path, placeholders(value, found), found)
    assert path.read_bytes() == expected.read_bytes()
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
    return path


CASES = {
    "stock's parameter file": {"cat_dim": 0, "vocab_tensor": True, "param": torch.arange(12.0).view(3, 4)},
    "stock's ZeRO-3 file": torch.arange(5000.0),
    "step": torch.tensor(3),
    "nothing": {},
    "empty tensors": [torch.empty(0), torch.empty(3, 0, 2), torch.empty(0, 4, dtype=torch.int8)],
    "new dtypes": [torch.ones(3).to(torch.float8_e4m3fn), torch.ones(2, 3).to(torch.uint16), torch.ones(1).bool()],
    "half": {"param": torch.ones(2, 3, dtype=torch.bfloat16), "other": torch.ones(7, dtype=torch.float16)},
    "many": {str(n): torch.full((n % 5,), float(n)) for n in range(1300)},
    "ordered": collections.OrderedDict(a=torch.ones(2), b=(1, 2.5, None, "text", b"bytes", [2**40, -1])),
    "strings torch uses itself": {"cpu": "storage", "storage": "cpu", "0": torch.ones(1)},
    "gradients required": {
        "param": torch.ones(2, 3, requires_grad=True),
        "half": torch.ones(2, dtype=torch.bfloat16, requires_grad=True),
        "complex": torch.ones(2, dtype=torch.complex64, requires_grad=True),
        "none": torch.ones(4),
    },
    "many extents": torch.empty(2, 1, 3, 1, 2),
}


@pytest.mark.parametrize("name", CASES)
def test_files_equal_torch_saves(tmp_path, name):
    path = assert_equal_to_torch(tmp_path, CASES[name])
    for mmap in (False, True):
        assert_same(torch.load(path, weights_only=True, mmap=mmap), CASES[name])


def assert_same(got, expected):
    assert type(got) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
        assert got.requires_grad == expected.requires_grad
        assert bytes_of(got) == bytes_of(expected)
    elif isinstance(expected, dict):
        assert list(got) == list(expected)
        for key in expected:
            assert_same(got[key], expected[key])
    elif isinstance(expected, (list, tuple)):
        assert len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            assert_same(one, other)
    else:
        assert got == expected


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.dictionaries(
        st.text(max_size=5),
        st.tuples(
            st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint32, torch.complex64]),
            st.lists(st.integers(0, 4), max_size=4),
        ),
        max_size=30,
    )
)
def test_any_shapes(tmp_path, shapes):
    assert_equal_to_torch(tmp_path, {key: torch.ones(shape, dtype=dtype) for key, (dtype, shape) in shapes.items()})


@pytest.mark.skipif(shutil.which("unzip") is None, reason="unzip is not installed")
def test_unzip_accepts_it(tmp_path):
    path = assert_equal_to_torch(tmp_path, CASES["stock's parameter file"])
    assert subprocess.run(["unzip", "-t", path], capture_output=True, check=False).returncode == 0


def test_one_placeholder_used_twice_is_one_tensor(tmp_path):
    tensor = torch.arange(4.0)
    expected, path = tmp_path / "a.pt", tmp_path / "b" / "a.pt"
    path.parent.mkdir()
    torch.save({"x": tensor, "y": tensor}, expected)
    found = {}
    made = placeholders(tensor, found)
    write(path, {"x": made, "y": made}, found)
    assert path.read_bytes() == expected.read_bytes()


def test_a_shape_given_twice_is_written_twice_as_torch_writes_it(tmp_path):
    shape = (2, 3)
    tensors = [torch.ones(shape), torch.zeros(shape)]
    expected, path = tmp_path / "a.pt", tmp_path / "b" / "a.pt"
    path.parent.mkdir()
    torch.save([*tensors, [2, 3]], expected)
    made = [NewTensor("float32", shape), NewTensor("float32", shape)]
    found = {id(new): (tensor, new) for new, tensor in zip(made, tensors, strict=True)}
    write(path, [*made, [2, 3]], found)
    assert path.read_bytes() == expected.read_bytes()


def test_stored_and_new_tensors_in_one_file(tmp_path):
    """The layout says where each storage's bytes come from; what is shared comes once."""
    base, empty, u16 = torch.arange(10.0), torch.empty(0), torch.ones(3).to(torch.uint16)
    first, expected = tmp_path / "x.pt", tmp_path / "y.pt"
    torch.save({"view": base[2:], "all": base, "empty": empty, "u16": u16, "e": empty.view(0, 2)}, first)
    live = torch.load(first)
    new = torch.full((3, 4), 7.0, requires_grad=True)
    torch.save([live["view"], {"new": new}, live["all"], live["empty"], live["u16"], live["e"]], expected)
    root = load_pickle(first).root
    made = NewTensor("float32", (3, 4), requires_grad=True)
    graph = [root["view"], {"new": made}, root["all"], root["empty"], root["u16"], root["e"]]
    layout = pickle.loads(pickle.dumps(PtLayout(graph, "y")))
    assert [placed.key for placed in layout.storages] == ["0", "1", "2", "3", "4"]
    assert [placed.nbytes for placed in layout.storages] == [40, 48, 0, 6, 0]
    expected_sources = [root[key].storage.key if key else None for key in ("view", "", "empty", "u16", "e")]
    assert [placed.source and placed.source.key for placed in layout.storages] == expected_sources
    assert [placed.tensor is None for placed in layout.storages] == [True, False, True, True, True]

    def data_of(placed):
        if placed.source is None:
            return bytes_of(new)
        return first.read_bytes()[placed.source.byte_offset :][: placed.nbytes]

    assert front_to_back(layout, data_of) == expected.read_bytes()
    stored = load_pickle(expected).archive.storages
    assert {p.key: p.byte_offset for p in layout.storages if p.nbytes} == {
        key: ref.byte_offset for key, ref in stored.items() if ref.nbytes
    }


def test_a_storage_seen_as_two_types_is_refused_as_torch_refuses_it():
    storage = StorageRef("/x.pt", "0", "float32", 4, 64, None, "cpu")
    other = StorageRef("/x.pt", "0", "int32", 4, 64, None, "cpu")
    larger = StorageRef("/x.pt", "0", "float32", 5, 64, None, "cpu")
    for one in (other, larger):
        with pytest.raises(UnsupportedLayoutError, match=r"/x\.pt: storage '0' is seen as 16 bytes of float32"):
            PtLayout([TensorRef(storage, 0, (4,), (1,)), TensorRef(one, 0, (4,), (1,))])
    live = torch.ones(4)
    with pytest.raises(RuntimeError, match="different types"):
        torch.save([live, live.view(torch.int32)], io.BytesIO())


def test_a_stand_in_is_written_as_the_object_it_stands_for(tmp_path, monkeypatch):
    module = types.ModuleType("somewhere.checkpoint")

    class SubparamShape:
        def __init__(self, patterns, shape, partition_dim):
            self.patterns, self.shape, self.partition_dim = patterns, shape, partition_dim

    SubparamShape.__module__, SubparamShape.__qualname__ = module.__name__, "SubparamShape"
    module.SubparamShape = SubparamShape
    monkeypatch.setitem(sys.modules, "somewhere", types.ModuleType("somewhere"))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    tensor = torch.ones(6, 2)
    live = {"sub_param_shape": SubparamShape(["a.*"], ((2, 4), 2), 0), "param": tensor}
    expected, path = tmp_path / "a.pt", tmp_path / "b" / "a.pt"
    path.parent.mkdir()
    torch.save(live, expected)
    attributes = {"patterns": ["a.*"], "shape": ((2, 4), 2), "partition_dim": 0}
    stand_in = new_instance("somewhere.checkpoint", "SubparamShape", attributes)
    found = {}
    write(path, {"sub_param_shape": stand_in, "param": placeholders(tensor, found)}, found)
    assert path.read_bytes() == expected.read_bytes()
    loaded = torch.load(path, weights_only=False)
    assert loaded["sub_param_shape"].partition_dim == 0


def test_threads_and_a_second_opener_may_write(tmp_path):
    path = tmp_path / "x.pt"
    size = 1 << 16
    layout = PtLayout({"a": NewTensor("uint8", (8 * size,))}, archive_name(path))
    layout = pickle.loads(pickle.dumps(layout))
    parts = [bytes([number]) * size for number in range(8)]
    with LaidOutFile(path, layout) as writer:
        threads = [
            threading.Thread(target=writer.write, args=("0", number * size, part)) for number, part in enumerate(parts)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        crc = zlib.crc32(parts[0])
        for part in parts[1:]:
            crc = crc32_combine(crc, zlib.crc32(part), size)
        writer.finish({"0": crc})
    assert zipfile.ZipFile(path).testzip() is None
    assert torch.load(path)["a"].view(8, size)[:, 0].tolist() == list(range(8))


def test_an_unfinished_file_is_no_checkpoint(tmp_path):
    path = tmp_path / "x.pt"
    layout = PtLayout({"a": NewTensor("float32", (100,))})
    with LaidOutFile(path, layout):
        pass
    with pytest.raises(ValueError, match="truncated or damaged"):
        load_pickle(path)


def test_misuse_is_refused():
    layout = PtLayout({"a": NewTensor("float32", (2,))})
    with pytest.raises(InvalidMapError, match="no checksum"):
        layout.trailer({})
    with pytest.raises(InvalidMapError, match="float31"):
        NewTensor("float31", (2,))
    with pytest.raises(InvalidMapError, match="-1"):
        NewTensor("float32", (-1,))
    for dtype in ("int64", "uint16", "float8_e4m3fn"):
        with pytest.raises(InvalidMapError, match=dtype):
            NewTensor(dtype, (2,), requires_grad=True)
    with pytest.raises(InvalidMapError, match="storage 0 of 'archive' has no checksum"):
        list(layout.sequence({}))


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("a/fp32.pt", "fp32"),
        ("a.b/x.y.pt", "x.y"),
        ("noext", "noext"),
        ("é/fp32.pt", "archive"),
        ("/a b/[c].pt", "[c]"),
    ],
)
def test_the_folder_in_the_archive_is_torchs(tmp_path, path, expected):
    assert archive_name(path) == expected
    full = tmp_path / path
    full.parent.mkdir(parents=True, exist_ok=True)
    torch.save(torch.ones(1), full)
    assert zipfile.ZipFile(full).namelist()[0] == f"{expected}/data.pkl"


@pytest.mark.heavy
def test_beyond_four_gibibytes_the_layout_is_torchs(tmp_path):
    """64-bit fields, for a size and for an offset: against a file torch writes without its data."""
    count = (1 << 32) + 192
    first, path = tmp_path / "torch" / "x.pt", tmp_path / "ours" / "x.pt"
    first.parent.mkdir()
    path.parent.mkdir()
    large = torch.empty(count, dtype=torch.uint8, device="cpu")
    with torch.serialization.skip_data():
        torch.save({"a": large, "b": torch.ones(5)}, first)
    del large
    layout = PtLayout({"a": NewTensor("uint8", (count,)), "b": NewTensor("float32", (5,))}, "x")
    with LaidOutFile(path, layout) as writer:
        writer.write("1", 0, torch.ones(5).numpy())
        crcs = {"0": crc32_of_zeros(count), "1": zlib.crc32(torch.ones(5).numpy())}
        writer.finish(crcs)
    loaded = load_pickle(path)
    assert [loaded.archive.storages[key].byte_offset for key in "01"] == [p.byte_offset for p in layout.storages]
    other = load_pickle(first).archive.storages
    assert [other[key].byte_offset for key in "01"] == [p.byte_offset for p in layout.storages]
    assert first.stat().st_size == layout.file_size == path.stat().st_size
    assert torch.equal(torch.load(path, mmap=True)["b"], torch.ones(5))
    with open(path, "rb") as ours, open(first, "rb") as theirs:
        for start, length in ((0, 1 << 20), ((1 << 32) - 4096, 1 << 20)):
            ours.seek(start)
            theirs.seek(start)
            a, b = ours.read(length), theirs.read(length)
            assert len(a) == len(b) > 4096
            # All that differs: b's twenty bytes of data, the checksums (two places each) and the fingerprint with its.
            assert sum(x != y for x, y in zip(a, b, strict=True)) <= 20 + 4 * 4 + 40 + 2 * 4
