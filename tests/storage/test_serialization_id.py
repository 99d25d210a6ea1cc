"""torch's fingerprint, repeated: files of many sizes written by torch are the oracle."""

import io
import zipfile

import pytest
import torch

from deepspeed_affine.storage import serialization_id as module
from deepspeed_affine.storage.serialization_id import serialization_id


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 23, 24, 54, 55, 400, 3000])
def test_it_is_torchs_at_every_size_of_its_hash_table(count):
    buffer = io.BytesIO()
    torch.save([torch.ones(number % 5) for number in range(count)], buffer)
    archive = zipfile.ZipFile(buffer)
    *records, fingerprint = archive.infolist()
    names = [record.filename.split("/", 1)[1] for record in records]
    crcs = [record.CRC for record in records if record.file_size]
    assert serialization_id(names, crcs).encode() == archive.read(fingerprint)


def test_more_records_than_the_known_table_sizes_still_get_one(monkeypatch):
    monkeypatch.setattr(module, "_BUCKETS", (13,))
    many = [f"data/{number}" for number in range(50)]
    first = serialization_id(many, [1])
    assert len(first) == 40
    assert first != serialization_id(many[::-1], [1])
