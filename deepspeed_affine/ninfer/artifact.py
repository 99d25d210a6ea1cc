"""Reading an artifact: its records at once, its values when they are asked for."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from deepspeed_affine.ir.ints import product, shown
from deepspeed_affine.ninfer.cache import DecodedCache
from deepspeed_affine.ninfer.decode import Fetch, decode_range, value_dtype
from deepspeed_affine.ninfer.directory import Directory
from deepspeed_affine.ninfer.errors import BindingError, FileSetError, RangeError, ReferenceError_
from deepspeed_affine.ninfer.fileset import FileSet, open_file_set
from deepspeed_affine.ninfer.floats import U8
from deepspeed_affine.ninfer.formats import CONTIGUOUS, DIRECT
from deepspeed_affine.ninfer.integers import extents, whole
from deepspeed_affine.ninfer.layouts import Geometry, check_resource, geometry_of
from deepspeed_affine.ninfer.records import Binding, Component, FileRecord, ObjectRecord, TensorObject, Use

if TYPE_CHECKING:
    import torch

    from deepspeed_affine.ninfer.binder import Bound, Demand

__all__ = ["Artifact", "open_artifact"]

Values = npt.NDArray[Any]

CACHE_BYTES = 64 << 20
"""Decoded values kept, so that a parent several parameters take from is decoded once. Larger parents are decoded by
rows, each row when it is asked for."""
_BLOCK_ELEMENTS = 1 << 20


def open_artifact(
    path: str | os.PathLike[str], components: Iterable[str] | None = None, *, cache_bytes: int = CACHE_BYTES
) -> Artifact:
    """The artifact whose entry is at ``path``, with the directory read and checked and nothing else.

    Continuations are opened by the first read that needs them, and may be absent until then. Components named must be
    there, else it is a ``BindingError``. ``cache_bytes`` is how much of decoded values is kept.
    """
    files = open_file_set(os.fspath(path))
    artifact = Artifact(files, cache_bytes)
    try:
        for name in components or ():
            artifact.component(name)
    except BaseException:
        artifact.close()
        raise
    return artifact


class Artifact:
    """An open artifact; every method may be called from any thread.

    Values are float32 arrays, and int32 for ``int32``; ``read_tensor`` gives torch tensors of the stored type. What is
    returned belongs to the caller.
    """

    def __init__(self, files: FileSet, cache_bytes: int = CACHE_BYTES) -> None:
        self._files = files
        self._cache = DecodedCache(cache_bytes)
        self._geometries: dict[str, Geometry] = {}

    def __enter__(self) -> Artifact:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """After this nothing is read any more; the records stay."""
        self._files.close()
        self._cache.clear()

    @property
    def file_set(self) -> FileSet:
        """The files below, for reading the payload as bytes."""
        return self._files

    @property
    def path(self) -> str:
        """Where the entry is."""
        return self._files.path

    @property
    def artifact_id(self) -> str:
        """The identity all files of the set share, 32 hexadecimal digits."""
        return self._files.artifact_id.hex()

    @property
    def directory(self) -> Directory:
        return self._files.directory

    @property
    def components(self) -> Mapping[str, Component]:
        return self.directory.components

    @property
    def objects(self) -> Mapping[str, ObjectRecord]:
        """Every stored object by its id, in order of offsets."""
        return self.directory.objects

    @property
    def bindings(self) -> Mapping[str, Binding]:
        return self.directory.bindings

    @property
    def uses(self) -> tuple[Use, ...]:
        return self.directory.uses

    @property
    def files(self) -> tuple[FileRecord, ...]:
        return self.directory.files

    @property
    def metadata(self) -> Mapping[str, Any]:
        return self.directory.metadata

    @property
    def provenance(self) -> Mapping[str, Any]:
        return self.directory.provenance

    @property
    def payload_bytes(self) -> int:
        return self.directory.payload_bytes

    @property
    def payload_offset(self) -> int:
        """Where the payload begins in the entry, in bytes."""
        return self._files.payload_offset

    def file_paths(self) -> list[str]:
        """Where the files of the set are expected, the entry first."""
        return [self._files.file_path(number) for number in range(len(self.files))]

    def component(self, name: str) -> Component:
        """The component of that name; one the artifact does not provide is a ``BindingError``."""
        found = self.components.get(name)
        if found is None:
            raise BindingError(
                f"{self.path}: has no component {shown(name)}; it provides {', '.join(map(repr, self.components))}. "
                "Use an artifact that has it, or leave it off.",
                file=self.path,
            )
        return found

    def uses_of(self, parameter: str) -> tuple[Use, ...]:
        """Every use of the parameter, in the order of the directory."""
        return tuple(use for use in self.uses if use.parameter == parameter)

    def bind(
        self,
        wanted: Mapping[str, Demand],
        components: Iterable[str] = (),
        *,
        targets: Mapping[str, str | None] | None = None,
        auxiliaries: Mapping[tuple[str, str], Mapping[str, Demand]] | None = None,
    ) -> Bound:
        """Everything asked for, resolved and checked by the directory alone; see ``binder.bind``."""
        from deepspeed_affine.ninfer.binder import bind

        return bind(self.directory, wanted, components, targets=targets, auxiliaries=auxiliaries)

    def geometry(self, object_id: str) -> Geometry:
        """The byte geometry of a stored tensor, checked against its record; an ``EncodingError`` if it has none."""
        return self._geometry(self.directory.tensor(object_id))

    def read_payload(self, offset: int, length: int) -> bytes:
        """Those bytes of the logical payload, from whichever files hold them."""
        return self._files.read(whole(offset, "An offset"), whole(length, "A length")).tobytes()

    def read_encoded(self, object_id: str) -> bytes:
        """The object's bytes as they are stored, whatever its encoding."""
        record = self.directory.object(object_id)
        return self.read_payload(record.offset, record.nbytes)

    def read_encoded_into(self, object_id: str, out: U8, offset: int = 0) -> None:
        """``out`` holds the object's stored bytes from ``offset`` on."""
        record = self.directory.object(object_id)
        offset = whole(offset, "An offset")
        if offset < 0 or offset + out.nbytes > record.nbytes:
            raise RangeError(
                f"Object {shown(object_id)}: bytes [{offset}, {offset + out.nbytes}) of {record.nbytes} were asked "
                "for; expected a range inside it."
            )
        self._files.read_into(record.offset + offset, out)

    def read(self, object_id: str) -> Any:
        """The object's value: an array of the tensor's shape, or the bytes of a resource."""
        record = self.directory.object(object_id)
        if not isinstance(record, TensorObject):
            check_resource(record)
            return self.read_encoded(object_id)
        self._ready(record, 0, record.elements)
        found = np.empty(record.elements, value_dtype(record.format))
        self._decode(record, 0, record.elements, found)
        return found.reshape(record.shape)

    def read_range(self, object_id: str, begin: int, end: int) -> Values:
        """Elements ``[begin, end)`` of a stored tensor in C order, flat."""
        record = self.directory.tensor(object_id)
        begin, end = whole(begin, "The begin of a range"), whole(end, "The end of a range")
        if not 0 <= begin <= end <= record.elements:
            raise RangeError(
                f"Object {shown(object_id)}: elements [{shown(begin)}, {shown(end)}) of {record.elements} were asked "
                "for; expected a range inside it."
            )
        self._ready(record, begin, end)
        found = np.empty(end - begin, value_dtype(record.format))
        self._decode(record, begin, end, found)
        return found

    def read_parameter(self, name: str, shape: Sequence[int] | None = None) -> Values:
        """A parameter's values, whatever objects they lie in.

        Without ``shape`` a whole object comes in its own shape and parts come flat. A whole object has no other shape
        than its own; another, or one with another number of elements, is a ``BindingError``.
        """
        binding = self._binding(name)
        count = self.directory.elements_of(binding)
        shape = self._shape(name, binding, count, shape)
        return self._values(name, binding, 0, count).reshape(shape)

    def read_parameter_range(self, name: str, begin: int, end: int) -> Values:
        """Elements ``[begin, end)`` of a parameter in C order, flat; rows without any of them are not read,
        except of parents small enough to be kept."""
        binding = self._binding(name)
        count = self.directory.elements_of(binding)
        begin, end = whole(begin, "The begin of a range"), whole(end, "The end of a range")
        if not 0 <= begin <= end <= count:
            raise RangeError(
                f"Parameter {shown(name)}: elements [{shown(begin)}, {shown(end)}) of {count} were asked for; expected "
                "a range inside it."
            )
        return self._values(name, binding, begin, end)

    def read_auxiliary(self, use: Use, role: str) -> Values:
        """The values of one of a use's auxiliaries: a whole object in its own shape, parts flat."""
        binding = use.auxiliaries.get(role)
        if binding is None:
            raise BindingError(
                f"The use of {shown(use.parameter)} with {shown(use.input)} has no auxiliary {shown(role)}; expected "
                "it."
            )
        count = self.directory.elements_of(binding)
        found = self._values(role, binding, 0, count)
        return found.reshape(self.directory.tensor(binding.object).shape) if binding.object is not None else found

    def blocks(self, name: str, size: int = _BLOCK_ELEMENTS) -> Iterator[Values]:
        """A parameter's values in order, flat, at most ``size`` elements at a time."""
        binding = self._binding(name)
        count = self.directory.elements_of(binding)
        size = whole(size, "The size of a block")
        if size < 1:
            raise RangeError(f"The size of a block is {shown(size)}; expected one element or more.")
        dtype = self.value_dtype_of(name, binding)
        ranges = self.directory.ranges_of(binding, 0, count)
        record, low, high = next(ranges)
        for begin in range(0, count, size):
            found = np.empty(min(size, count - begin), dtype)
            at = 0
            while at < len(found):
                if low == high:
                    record, low, high = next(ranges)
                stop = min(high, low + len(found) - at)
                self._ready(record, low, stop)
                self._decode(record, low, stop, found[at : at + stop - low])
                at, low = at + stop - low, stop
            yield found

    def read_resource(self, component: str, role: str) -> bytes:
        """The bytes of a component's resource."""
        found = self.component(component).resources.get(role)
        if found is None:
            raise BindingError(f"{self.path}: component {shown(component)} has no resource {shown(role)}; expected it.")
        data: bytes = self.read(found)
        return data

    def read_tensor(self, object_id: str) -> torch.Tensor:
        """The stored tensor as a torch tensor: bfloat16, float32 or int32 as stored, float32 where it is decoded."""
        import torch

        record = self.directory.tensor(object_id)
        if record.format != "bf16":
            return torch.from_numpy(self.read(object_id))
        geometry_of(record)
        words = np.frombuffer(bytearray(self.read_encoded(object_id)), "<i2").astype(np.int16, copy=False)
        return torch.from_numpy(words).view(torch.bfloat16).reshape(record.shape)

    def validate(self) -> None:
        """Return if every file is there and every object's encoding, codes and scales are what its format allows."""
        from deepspeed_affine.ninfer.checking import check_artifact

        check_artifact(self)

    def _binding(self, name: str) -> Binding:
        found = self.bindings.get(name)
        if found is None:
            raise ReferenceError_(f"{self.path}: has no parameter {shown(name)}; expected one of its bindings.")
        return found

    def _shape(self, name: str, binding: Binding, count: int, shape: Sequence[int] | None) -> tuple[int, ...]:
        own = self.directory.tensor(binding.object).shape if binding.object is not None else None
        if shape is None:
            return (count,) if own is None else own
        shape = extents(shape, f"The shape of parameter {shown(name)}")
        if product(shape) != count or (own is not None and shape != own):
            has = f"{count} elements in parts" if own is None else f"the whole object of shape {own}"
            raise BindingError(
                f"Parameter {shown(name)}: shape {shape} was asked for; its binding gives {has}. Expected the shape "
                "the artifact was written for."
            )
        return shape

    def value_dtype_of(self, name: str, binding: Binding) -> np.dtype[Any]:
        """The one type all values of the binding have; ``name`` is said where they have two."""
        kinds = {value_dtype(self.directory.tensor(object_id).format) for object_id in binding.objects}
        if len(kinds) > 1:
            raise BindingError(
                f"{shown(name)}: its parts mix int32 with floating-point objects; expected numbers of one kind."
            )
        return kinds.pop()

    def _values(self, name: str, binding: Binding, begin: int, end: int) -> Values:
        """Elements ``[begin, end)`` of what the binding gives."""
        ranges = list(self.directory.ranges_of(binding, begin, end))
        dtype = self.value_dtype_of(name, binding)
        for record, low, high in ranges:
            self._ready(record, low, high)
        found = np.empty(end - begin, dtype)
        at = 0
        for record, low, high in ranges:
            self._decode(record, low, high, found[at : at + high - low])
            at += high - low
        return found

    def _geometry(self, record: TensorObject) -> Geometry:
        # Parts may be many thousands, of few objects.
        found = self._geometries.get(record.id)
        if found is None:
            found = self._geometries[record.id] = geometry_of(record)
        return found

    def _ready(self, record: TensorObject, begin: int, end: int) -> None:
        """After this the record is known to be true and the bytes of those elements to be there.

        Nothing is allocated for an object before, so that a damaged directory cannot ask for more than its files hold.
        """
        geometry = self._geometry(record)
        if begin == end:
            return
        if geometry.layout == CONTIGUOUS:
            width = DIRECT[record.format]
            self._files.require(record.offset + begin * width, (end - begin) * width)
            return
        step = geometry.columns * geometry.row_unit
        first, stop = begin // step * geometry.row_unit, -(-end // step) * geometry.row_unit
        for span in geometry.row_spans(first, stop):
            self._files.require(record.offset + span.offset, span.nbytes)

    def _decode(self, record: TensorObject, begin: int, end: int, out: Values) -> None:
        geometry = self._geometry(record)
        if DIRECT.get(record.format) == out.itemsize and sys.byteorder == "little":
            # The stored words are the values.
            self._files.read_into(record.offset + begin * out.itemsize, out.view(np.uint8))
            return
        if geometry.layout == CONTIGUOUS or not self._cache.takes(4 * record.elements):
            # Words are no dearer to decode than to copy.
            decode_range(geometry, self.fetcher(record), begin, end, out)
            return

        def all_of_it() -> Values:
            values = np.empty(record.elements, value_dtype(record.format))
            decode_range(geometry, self.fetcher(record), 0, record.elements, values)
            return values

        out[:] = self._cache.get(record.id, all_of_it)[begin:end]

    def fetcher(self, record: ObjectRecord) -> Fetch:
        """What reads ranges of the object's stored bytes."""

        def fetch(offset: int, count: int) -> U8:
            try:
                return self._files.read(record.offset + offset, count)
            except FileSetError as fault:
                raise FileSetError(f"Object {shown(record.id)}: {fault.message}", file=fault.file) from fault

        return fetch
