"""Tensors over the bytes of a file, without copying and without reading a file whole."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any

from deepspeed_affine.errors import CheckpointFormatError
from deepspeed_affine.storage.refs import StorageRef, TensorRef

if TYPE_CHECKING:
    import torch

__all__ = ["FileMaps", "open_storage", "open_tensor", "read_into"]

_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
_FAILED = ctypes.c_void_p(-1).value


class _Region:
    """One private mapping of a whole file; unmapped when the last view of it is gone, and not before."""

    def __init__(self, path: str) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self.size = os.fstat(fd).st_size
            # Private and writable: a stray in-place write changes this process's copy of a page, neither the file
            # nor (as on a read-only page) the life of the process. Unreserved: a file may be larger than memory.
            # Through libc because mmap.mmap keeps a descriptor open per map, and folders have thousands of files.
            address = _libc_mmap(fd, self.size) if self.size else None
        finally:
            os.close(fd)
        array_type = ctypes.c_ubyte * self.size
        self.buffer: Any = array_type.from_address(address) if address else array_type()
        if address:
            weakref.finalize(self.buffer, _libc_munmap, address, self.size).atexit = False


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def _libc_mmap(fd: int, size: int) -> int:
    flags = mmap.MAP_PRIVATE | _MAP_NORESERVE
    address: int | None = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0)
    if address is None or address == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return address


def _libc_munmap(address: int, size: int) -> None:
    _libc.munmap(address, size)


class FileMaps:
    """One read-only map per file, shared by all threads; no descriptor stays open.

    ``close`` forgets the maps; each is unmapped when the last tensor over it is gone, so no tensor ever dangles.
    """

    def __init__(self) -> None:
        self._regions: dict[str, _Region] = {}
        self._lock = threading.Lock()
        self._closed = False

    def __enter__(self) -> FileMaps:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._regions)

    def close(self) -> None:
        """After this the object opens no further file; tensors already opened stay valid."""
        with self._lock:
            self._closed = True
            self._regions.clear()

    def release(self, path: str) -> None:
        """Forget the map of one file, so that its address space is freed with its last tensor."""
        with self._lock:
            self._regions.pop(path, None)

    def region(self, path: str) -> Any:
        """Return a buffer over the whole file at ``path``; it keeps the mapping alive."""
        with self._lock:
            if self._closed:
                raise ValueError("these file maps are closed")
            found = self._regions.get(path)
            if found is None:
                try:
                    found = self._regions[path] = _Region(path)
                except OSError as exc:
                    raise CheckpointFormatError(
                        f"{path}: cannot be mapped ({exc.strerror}); expected the file its metadata was read from. "
                        "Check that it is still there.",
                        file=path,
                    ) from exc
            return found.buffer


def open_storage(ref: StorageRef, maps: FileMaps) -> torch.UntypedStorage:
    """Return the storage's bytes in place in the file's map; nothing is copied."""
    import torch

    if ref.nbytes == 0:
        return torch.empty((0,), dtype=torch.uint8).untyped_storage()
    return _bytes_of(ref, maps).untyped_storage()


def _size_now(path: str) -> int:
    """The file's size; one that was moved or deleted lives on under its map, and so has the size it had."""
    try:
        return os.stat(path).st_size
    except OSError:
        return sys.maxsize


def _bytes_of(ref: StorageRef, maps: FileMaps) -> torch.Tensor:
    import torch

    buffer = maps.region(ref.path)
    # Reading a page past a file's end ends the process, so the size is asked again for every tensor. What is cut off
    # a file while a tensor of it is being read cannot be caught.
    size = min(len(buffer), _size_now(ref.path))
    if ref.byte_offset + ref.nbytes > size:
        raise CheckpointFormatError(
            f"{ref.path}: has {size} bytes; storage {ref.key!r} ends at {ref.byte_offset + ref.nbytes}. The "
            "file became shorter after its metadata was read: let nothing write to it and run again.",
            file=ref.path,
        )
    return torch.frombuffer(buffer, dtype=torch.uint8, count=ref.nbytes, offset=ref.byte_offset)


def open_tensor(ref: TensorRef, maps: FileMaps) -> torch.Tensor:
    """Return the tensor as a view of the file's map: no copy, read-only by agreement.

    The file must keep its bytes while the tensor is read: one that has become shorter by now is refused, one that is
    cut off later takes the process down, as any mapped file does. A write changes this process's private copy of the
    page and never the file. A meta tensor stays one. Tensors opened one by one do not share storage objects; use
    ``open_storage`` where that matters.
    """
    import torch

    dtype = getattr(torch, ref.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointFormatError(
            f"{ref.storage.path}: storage {ref.storage.key!r} has dtype {ref.dtype}; this torch "
            f"({torch.__version__}) has none of that name. Use the torch that wrote the file, or a newer one.",
            file=ref.storage.path,
        )
    if ref.is_meta:
        return torch.empty_strided(ref.shape, ref.strides, dtype=dtype, device="meta")
    made = torch.empty((0,), dtype=dtype)
    return made.set_(open_storage(ref.storage, maps), ref.offset, ref.shape, ref.strides)


def read_into(path: str, byte_offset: int, target: Any) -> None:
    """Fill the writable buffer ``target`` with the file's bytes from ``byte_offset`` on, by pread.

    ``target`` is anything with the buffer protocol; for a torch tensor pass ``tensor.view(torch.uint8).numpy()``.
    """
    view = memoryview(target).cast("B")
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as exc:
        raise CheckpointFormatError(
            f"{path}: cannot be opened ({exc.strerror}); expected the file its metadata was read from. Check that it "
            "is still there.",
            file=path,
        ) from exc
    try:
        done = 0
        while done < len(view):
            got = os.preadv(fd, [view[done:]], byte_offset + done)
            if got == 0:
                raise CheckpointFormatError(
                    f"{path}: ends at byte {byte_offset + done}; {len(view) - done} more were expected. The file is "
                    "truncated: copy it again.",
                    file=path,
                )
            done += got
    finally:
        os.close(fd)
