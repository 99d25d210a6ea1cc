"""What tests need to see stored tensors and to write laid-out files, away from the product's own executor."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from deepspeed_affine.execute.convert import ExecutionOptions, write_files
from deepspeed_affine.plan.conversion import ConversionPlan, ObjectFile
from deepspeed_affine.storage.files import ByteReader
from deepspeed_affine.storage.pt_writer import PtLayout
from deepspeed_affine.storage.refs import TensorRef
from deepspeed_affine.storage.sink import LocalSink

if TYPE_CHECKING:
    import torch


def load_tensor(ref: TensorRef) -> torch.Tensor:
    """The tensor with its own strides, over the storage's bytes as the file has them."""
    import torch

    dtype = getattr(torch, ref.dtype)
    if ref.is_meta:
        return torch.empty_strided(ref.shape, ref.strides, dtype=dtype, device="meta")
    with ByteReader() as reader:
        data = bytearray(reader.read(ref.storage.path, ref.storage.byte_offset, ref.storage.nbytes))
    held = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return torch.empty(0, dtype=dtype).set_(held.untyped_storage(), ref.offset, ref.shape, ref.strides)


def save_objects(path: str | os.PathLike[str], obj: Any) -> None:
    """The file torch.save would write of what ``obj`` stands for, as the converter writes its object files."""
    with suppress(FileNotFoundError):
        os.unlink(path)
    folder, name = os.path.split(path)
    plan = ConversionPlan((), (), (ObjectFile(name, obj),), ())
    with ByteReader() as reader:
        write_files(plan, reader, LocalSink(folder, durable=False), ExecutionOptions(workers=1))


class LaidOutFile:
    """A file of a given layout, written at offsets in any order."""

    def __init__(self, path: str | os.PathLike[str], layout: PtLayout) -> None:
        self.layout = layout
        self.places = {placed.key: placed.byte_offset for placed in layout.storages}
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        os.ftruncate(self.fd, layout.file_size)
        for offset, data in layout.header():
            os.pwrite(self.fd, data, offset)

    def __enter__(self) -> LaidOutFile:
        return self

    def __exit__(self, *exc: object) -> None:
        os.close(self.fd)

    def write(self, key: str, start: int, data: Any) -> None:
        os.pwrite(self.fd, data, self.places[key] + start)

    def finish(self, crcs: Mapping[str, int]) -> None:
        for offset, data in self.layout.trailer(crcs):
            os.pwrite(self.fd, data, offset)
