"""Files summed by several threads: the checksum of the whole, every byte read once, faults named."""

import zlib

import pytest

from deepspeed_affine.errors import CheckpointFormatError
from deepspeed_affine.execute import reread
from deepspeed_affine.execute.reread import sum_files
from deepspeed_affine.storage.files import ByteReader


class Counting(ByteReader):
    def __init__(self):
        super().__init__()
        self.reads = []

    def read_into(self, path, offset, out):
        self.reads.append((path, offset, len(out)))
        super().read_into(path, offset, out)


@pytest.mark.parametrize("segment", [1, 7, 16, 1000])
@pytest.mark.parametrize("chunk", [1, 5, 4096])
def test_sums_of_files_cut_anyhow(tmp_path, monkeypatch, segment, chunk):
    monkeypatch.setattr(reread, "SEGMENT_BYTES", segment)
    contents = {"a": b"", "b/c": b"x", "b/d e": bytes(range(100)), "f": b"\0" * 17}
    (tmp_path / "b").mkdir()
    for name, data in contents.items():
        (tmp_path / name).write_bytes(data)
    told = []
    with Counting() as reader:
        sizes = {name: len(data) for name, data in contents.items()}
        found = sum_files(sizes, str(tmp_path), reader, 3, chunk_bytes=chunk, advance=told.append)
    assert found == {name: zlib.crc32(data) for name, data in contents.items()}
    assert sum(told) == sum(sizes.values())
    for name, data in contents.items():
        places = sorted((at, at + n) for path, at, n in reader.reads if path == str(tmp_path / name))
        assert [at for at, _ in places] == [0, *[stop for _, stop in places[:-1]]][: len(places)]
        assert (places[-1][1] if places else 0) == len(data)
        assert all(stop - at <= chunk for at, stop in places)


def test_what_cannot_be_read_is_said_of_that_file_alone(tmp_path):
    (tmp_path / "good").write_bytes(b"abc")
    (tmp_path / "short").write_bytes(b"abc")
    with ByteReader() as reader:
        found = sum_files({"good": 3, "short": 4, "gone": 1}, str(tmp_path), reader, 2)
    assert found["good"] == zlib.crc32(b"abc")
    for name in ("short", "gone"):
        assert isinstance(found[name], CheckpointFormatError)
        assert name in found[name].message
