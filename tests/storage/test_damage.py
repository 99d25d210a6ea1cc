"""Where a file is damaged is found from its own records: every region, every bit."""

import random
from collections import OrderedDict

import pytest
import torch

from deepspeed_affine.storage.damage import find_damage
from deepspeed_affine.storage.files import open_metadata
from deepspeed_affine.storage.pt_reader import load_pickle
from deepspeed_affine.storage.zip_reader import read_directory

ROOT = {"module": OrderedDict(a=torch.arange(40.0), b=torch.ones(3, 5)), "step": 7, "list": [torch.zeros(2), "x"]}


@pytest.fixture
def path(tmp_path):
    torch.save(ROOT, tmp_path / "x.pt")
    return str(tmp_path / "x.pt")


def regions(path):
    """``{region: its bytes}`` of an archive: of every record its header, data and what follows, and the directory."""
    file = open_metadata(path)
    try:
        directory = read_directory(file, path)
        found, end = {}, 0
        for record in sorted(directory.records.values(), key=lambda item: item.header_offset):
            start = directory.data_offset(file, record)
            name = record.name.partition("/")[2]
            assert record.header_offset == end
            found["header", name] = range(record.header_offset, start)
            found["data", name] = range(start, start + record.size)
            after = start + record.size
            while file.pread(4, after) not in (b"PK\x03\x04", b"PK\x01\x02"):
                after += 4
            found["after", name] = range(start + record.size, after)
            end = after
        found["directory", ""] = range(directory.directory_offset, directory.file_size)
        assert end == directory.directory_offset
        return found
    finally:
        file.close()


def flipped(path, byte, bit):
    with open(path, "rb") as file:
        data = bytearray(file.read())
    data[byte] ^= 1 << bit
    with open(path, "wb") as file:
        file.write(data)


def expected_parts(region, name):
    """What a flip there may be called. A header that no longer fits makes its record unreadable."""
    if region == "data":
        return {"data.pkl": {"pickle"}}.get(name, {"storage"} if name.startswith("data/") else {"record"})
    return {"directory": {"directory", "unreadable", "header"}}.get(region, {"header"})


def test_every_byte_of_a_file(path):
    """The right part is named for a flip of any byte, and the file is whole again after flipping it back."""
    where = regions(path)
    generator = random.Random(1)
    tried = 0
    for (region, name), places in where.items():
        for byte in places:
            bit = generator.randrange(8)
            flipped(path, byte, bit)
            found = find_damage(path)
            assert len(found) == 1, (region, name, byte - places.start, found)
            (damage,) = found
            assert damage.part in expected_parts(region, name), (region, name, byte - places.start, damage)
            if region == "data":
                assert (damage.start, damage.stop) == (places.start, places.stop)
                assert f"bytes {places.start} to {places.stop}" in damage.describe()
            elif damage.stop and (region, damage.part) != ("directory", "header"):
                assert damage.start <= byte < damage.stop
            flipped(path, byte, bit)
            tried += 1
    with open(path, "rb") as file:
        assert tried == len(file.read())


@pytest.mark.parametrize(("key", "place"), [("0", "['module']['a']"), ("1", "['module']['b']"), ("2", "['list'][0]")])
def test_storages_are_named_by_what_they_hold(path, key, place):
    storage = load_pickle(path).archive.storages[key]
    flipped(path, storage.byte_offset + storage.nbytes - 1, 7)
    (damage,) = find_damage(path)
    assert (damage.part, damage.key, damage.place) == ("storage", key, place)
    assert damage.describe() == (
        f"storage {key!r} (bytes {storage.byte_offset} to {storage.byte_offset + storage.nbytes} of the file), which "
        f"holds {place}"
    )


def test_several_damages_are_all_named(path):
    storages = load_pickle(path).archive.storages
    for key in ("0", "2"):
        flipped(path, storages[key].byte_offset, 3)
    assert [damage.key for damage in find_damage(path)] == ["0", "2"]


def test_a_shared_storage_names_one_place_and_counts_the_others(tmp_path):
    flat = torch.arange(10.0)
    torch.save({"a": flat[:5], "b": flat[5:], "c": flat}, tmp_path / "x.pt")
    storage = load_pickle(tmp_path / "x.pt").archive.storages["0"]
    flipped(tmp_path / "x.pt", storage.byte_offset, 0)
    (damage,) = find_damage(str(tmp_path / "x.pt"))
    assert damage.place == "['a'] and 2 more"


def test_a_damaged_pickle_and_a_damaged_storage(path):
    where = regions(path)
    flipped(path, where["data", "data.pkl"].start, 0)
    flipped(path, where["data", "data/1"].start, 0)
    assert [(damage.part, damage.place) for damage in find_damage(path)] == [("pickle", None), ("storage", None)]


def test_another_file_in_its_place_is_not_called_damaged(tmp_path):
    torch.save({"other": torch.ones(3)}, tmp_path / "x.pt")
    (damage,) = find_damage(str(tmp_path / "x.pt"))
    assert (damage.part, damage.describe()) == (
        "replaced",
        "is another file: whole in itself, and not the one that was written",
    )


def test_without_checksums_the_data_cannot_be_told(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(ROOT, tmp_path / "x.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    storage = load_pickle(tmp_path / "x.pt").archive.storages["0"]
    flipped(tmp_path / "x.pt", storage.byte_offset, 0)
    (damage,) = find_damage(str(tmp_path / "x.pt"))
    assert damage.part == "outside"
    assert "without a checksum" in damage.text


@pytest.mark.parametrize("content", [b"", b"text", b"PK\x03\x04" + bytes(100), b"PK\x05\x06" + bytes(18)])
def test_what_is_no_archive(tmp_path, content):
    (tmp_path / "x.pt").write_bytes(content)
    assert find_damage(str(tmp_path / "x.pt"))


def test_what_is_not_there(tmp_path):
    (damage,) = find_damage(str(tmp_path / "x.pt"))
    assert damage.part == "unreadable"


def test_random_damage_never_fails_otherwise(path):
    with open(path, "rb") as file:
        intact = file.read()
    generator = random.Random(3)
    for _ in range(1500):
        data = bytearray(intact)
        for _ in range(generator.choice((1, 2, 8))):
            data[generator.randrange(len(data))] = generator.choice((0, 255, generator.randrange(256)))
        if generator.random() < 0.2:
            data = data[: generator.randrange(len(data))]
        with open(path, "wb") as file:
            file.write(data)
        if bytes(data) != intact:
            assert all(damage.text for damage in find_damage(path))
            assert find_damage(path)
