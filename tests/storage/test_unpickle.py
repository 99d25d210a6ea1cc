"""The pickle machine: what it builds equals what pickle builds, and what it must not run does not run."""

import collections
import contextlib
import io
import os
import pickle
import pickletools
import random
import struct
from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_affine.errors import AffineError, CheckpointFormatError
from deepspeed_affine.storage import unpickle
from deepspeed_affine.storage.refs import Global, StandIn, is_instance_of
from deepspeed_affine.storage.unpickle import load_inert


def refuse_persistent(pid):
    raise ValueError(f"unexpected persistent id {pid!r}")


def load(data):
    return load_inert(data, refuse_persistent, "file.pt")


atoms = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(max_size=300)
    | st.complex_numbers(allow_nan=False)
)
keys = st.integers() | st.text() | st.tuples(st.integers(), st.text()) | st.frozensets(st.integers(), max_size=3)
graphs = st.recursive(
    atoms | st.sets(st.integers(), max_size=4) | st.frozensets(st.text(), max_size=3),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.tuples(inner, inner)
        | st.lists(inner, max_size=5).map(tuple)
        | st.dictionaries(keys, inner, max_size=5)
        | st.dictionaries(keys, inner, max_size=5).map(collections.OrderedDict)
    ),
    max_leaves=20,
)


@given(graphs, st.integers(0, 5))
def test_plain_data_of_every_protocol_is_what_pickle_reads(value, protocol):
    assert load(pickle.dumps(value, protocol=protocol)) == value


def test_bytearrays_and_deep_sharing():
    shared = ["x"]
    value = {"a": shared, "b": (shared, shared), "c": bytearray(b"\x00\xff"), "d": bytearray()}
    for protocol in range(6):
        got = load(pickle.dumps(value, protocol=protocol))
        assert got == value
        assert got["a"] is got["b"][0] is got["b"][1]


def test_a_list_that_holds_itself():
    loop = []
    loop.append(loop)
    got = load(pickle.dumps(loop, protocol=2))
    assert got[0] is got
    assert len(got) == 1


def test_python2_strings_and_names():
    assert load(b"S'ab\\x41'\np0\n.") == "abA"
    assert load(b"U\x02hi.") == "hi"
    assert load(b"T\x02\x00\x00\x00hi.") == "hi"
    assert load(b"\x80\x02c__builtin__\nxrange\n.") == Global("builtins", "range")
    assert load(b"\x80\x02ccopy_reg\n_reconstructor\n.") == Global("copyreg", "_reconstructor")


class Fragment:
    def __init__(self):
        self.numel = 3
        self.start = 7


def test_attributes_of_a_foreign_object_read_as_usual():
    got = load(pickle.dumps(Fragment(), protocol=2))
    assert isinstance(got, StandIn)
    assert (got.numel, got.start) == (3, 7)
    assert is_instance_of(got, "Fragment")
    assert is_instance_of(got, "Fragment", __name__)
    assert not is_instance_of(got, "Fragment", "elsewhere")
    with pytest.raises(AttributeError, match="Fragment"):
        _ = got.missing


class Slotted:
    __slots__ = ("here",)


def test_slots_named_tuples_dict_and_list_subclasses_keep_their_ingredients():
    slotted = Slotted()
    slotted.here = 4
    assert load(pickle.dumps(slotted, protocol=2)).here == 4
    counter = load(pickle.dumps(collections.Counter("aab"), protocol=2))
    assert counter.stand_in_class == Global("collections", "Counter")
    assert counter.stand_in_args == ({"a": 2, "b": 1},)
    default = load(pickle.dumps(collections.defaultdict(list, {"k": [1]}), protocol=2))
    assert default.stand_in_args == (Global("builtins", "list"),)
    assert default.stand_in_dict == [("k", [1])]
    queue = load(pickle.dumps(collections.deque([1, 2]), protocol=2))
    assert queue.stand_in_list == [1, 2]


def test_stand_ins_travel_to_spawned_workers():
    got = load(pickle.dumps([Fragment(), Fragment()], protocol=2))
    again = pickle.loads(pickle.dumps(got))
    assert [(x.numel, x.start) for x in again] == [(3, 7), (3, 7)]
    plain = pickle.loads(pickle.dumps(StandIn(Global("m", "C"), ())))
    assert pickle.dumps(plain.stand_in_state) == pickle.dumps(StandIn(Global("m", "C"), ()).stand_in_state)


def reduce_pickle(module, name, *args):
    class Gadget:
        def __reduce__(self):
            return (MarkerFunction, args)

    class MarkerFunction:
        pass

    buffer = io.BytesIO()

    def save_global(self, obj):
        self.write(b"c" + module.encode() + b"\n" + name.encode() + b"\n")
        self.memoize(obj)

    class Pickler(pickle._Pickler):
        dispatch: ClassVar = {**pickle._Pickler.dispatch, type: save_global}

    Pickler(buffer, protocol=2).dump(Gadget())
    return buffer.getvalue()


def gadgets(path):
    """Pickles that create ``path`` when a real unpickler loads them, in the opcodes attackers use."""
    command = f"touch {path}"
    code = f"open({path!r}, 'w').close()"
    text = struct.pack("<I", len(command)) + command.encode()
    source = struct.pack("<I", len(code)) + code.encode()
    short_command = bytes([len(command)]) + command.encode()
    yield "system by REDUCE", reduce_pickle("os", "system", command)
    yield "posix system", reduce_pickle("posix", "system", command)
    yield "eval", reduce_pickle("builtins", "eval", code)
    yield "exec", reduce_pickle("builtins", "exec", code)
    yield "python 2 eval", reduce_pickle("__builtin__", "eval", code)
    yield "subprocess", reduce_pickle("subprocess", "getoutput", command)
    yield "runpy", reduce_pickle("timeit", "timeit", "pass", code)
    yield (
        "nested STACK_GLOBAL",
        b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c" + short_command + b"\x85R.",
    )
    yield (
        "dotted STACK_GLOBAL",
        b"\x80\x04\x8c\x06shutil\x8c\x09os.system\x93\x8c" + short_command + b"\x85R.",
    )
    yield (
        "getattr of a module",
        b"\x80\x02c__builtin__\ngetattr\ncimportlib\nimport_module\nX\x02\x00\x00\x00os\x85RX\x06\x00\x00\x00system"
        b"\x86RX" + text + b"\x85R.",
    )
    yield (
        "attrgetter",
        b"\x80\x02coperator\nattrgetter\nX\x06\x00\x00\x00system\x85Rcimportlib\nimport_module\nX\x02\x00\x00\x00os"
        b"\x85R\x85RX" + text + b"\x85R.",
    )
    yield "partial", b"\x80\x02cfunctools\npartial\ncos\nsystem\nX" + text + b"\x86R)R."
    yield "map", b"\x80\x02c__builtin__\nlist\nc__builtin__\nmap\ncos\nsystem\n]X" + text + b"a\x86R\x85R."
    yield "INST", b"(X" + text + b"ios\nsystem\n."
    yield "OBJ", b"(cos\nsystem\nX" + text + b"o."
    yield "NEWOBJ", b"\x80\x02cos\nsystem\nX" + text + b"\x85\x81."
    yield "NEWOBJ_EX", b"\x80\x04cos\nsystem\nX" + text + b"\x85}\x92."
    yield (
        "BUILD with __setstate__",
        b"\x80\x02ccollections\nOrderedDict\n)R}X\x0c\x00\x00\x00__setstate__cos\nsystem\nsbX" + text + b"b.",
    )
    yield (
        "BUILD over a class",
        b"\x80\x02cm\nC\n)\x81}X\x0c\x00\x00\x00__setstate__cos\nsystem\nsbX" + text + b"b.",
    )
    yield "exec in a dict", b"\x80\x02}X\x01\x00\x00\x00kcbuiltins\nexec\nX" + source + b"\x85Rs."
    yield "torch inner load", reduce_pickle("torch.storage", "_load_from_bytes", reduce_pickle("os", "system", command))
    yield "numpy loader", reduce_pickle("numpy.testing._private.utils", "runstring", code, {})
    yield (
        "dict key with __hash__",
        b"\x80\x02}cm\nC\n)\x81}X\x08\x00\x00\x00__hash__cos\nsystem\nsbK\x01s.",
    )
    yield (
        "rebuild with a hook",
        b"\x80\x02ctorch._tensor\n_rebuild_from_type_v2\n(cos\nsystem\nctorch\nTensor\nX" + text + b"\x85}tR.",
    )
    yield "EXT1", b"\x80\x02\x82\x01."
    yield "EXT2", b"\x80\x02\x83\x01\x00."
    yield "EXT4", b"\x80\x02\x84\x01\x00\x00\x00."


def test_some_gadgets_are_live(tmp_path):
    """The control: with the real unpickler the same bytes do run."""
    live = {"system by REDUCE", "nested STACK_GLOBAL", "INST", "OBJ", "partial", "attrgetter", "getattr of a module"}
    seen = set()
    for name, data in gadgets(str(tmp_path / "made")):
        if name in live:
            pickle.loads(data)
            assert (tmp_path / "made").exists(), name
            (tmp_path / "made").unlink()
            seen.add(name)
    assert seen == live


def test_no_gadget_runs(tmp_path):
    target = tmp_path / "made"
    read = refused = 0
    for name, data in gadgets(str(target)):
        try:
            repr(load(data))
            read += 1
        except CheckpointFormatError:
            refused += 1
        assert not target.exists(), name
    assert read >= 15
    assert refused >= 3


def test_nothing_is_imported(tmp_path, monkeypatch):
    (tmp_path / "trap_module.py").write_text(f"open({str(tmp_path / 'made')!r}, 'w').close()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    got = load(b"\x80\x02ctrap_module\nThing\n)\x81.")
    assert got.stand_in_class == Global("trap_module", "Thing")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b".",
        b"\x80\x02",
        b"\x80\x09N.",
        b"N",
        b"NN.",
        b"(.",
        b"h\x00.",
        b"q\x00N.",
        b"0N.",
        b"R.",
        b"N)R.b",
        b"K\x01K\x02R.",
        b"X\xff\xff\xff\xff.",
        b"\x8e\xff\xff\xff\xff\xff\xff\xff\xffab.",
        b"\x8b\xff\xff\xff\xff.",
        b"\x95\xff\xff\xff\xff\xff\xff\xff\x7fN.",
        b"Iabc\n.",
        b"I" + b"9" * 100_000 + b"\n.",
        b"X\x01\x00\x00\x00\xff.",
        b"](a.",
        b"}K\x01u.",
        b"}(K\x01u.",
        b"}]Ns.",
        b"N}b.",
        b"Pid\n.",
        b"NQ.",
        b"\x97.",
        b"\x98.",
        b"\xff.",
        b"c\xff\n\xff\n.",
        b"\x80\x04NN\x93.",
        b"ccollections\nOrderedDict\n)R}X\x04\x00\x00\x00keysNsb.",
        b"cm\nC\n)\x81}b}b.",
    ],
)
def test_malformed_streams_are_refused_by_name(data):
    with pytest.raises(CheckpointFormatError, match=r"file\.pt") as caught:
        load(data)
    assert caught.value.file == "file.pt"


def test_bombs_are_refused_or_harmless():
    nest = b"\x80\x02" + b")" + b"\x85" * 200_000
    with pytest.raises(CheckpointFormatError, match="too many parts"):
        load(b"\x80\x02}" + nest[2:] + b"Ns.")
    doubled = b")" + b"2\x86" * 60
    with pytest.raises(CheckpointFormatError, match="too many parts"):
        load(b"\x80\x02}" + doubled + b"Ns.")
    laughs = load(b"\x80\x02" + b"]" + b"2\x86" * 60 + b".")
    assert isinstance(laughs, tuple)
    allocate = load(b"\x80\x02cbuiltins\nbytearray\n\x8a\x06\x00\x00\x00\x00\x00\x10\x85R.")
    assert isinstance(allocate, StandIn)
    assert load(b"r\xff\xff\xff\xffN."[5:]) is None
    assert load(b"Nr\xff\xff\xff\xff.") is None


def test_metadata_beyond_the_limit_is_refused(monkeypatch):
    monkeypatch.setattr(unpickle, "MAX_PICKLE_BYTES", 10)
    with pytest.raises(CheckpointFormatError, match="at most 10"):
        load(pickle.dumps("a text of more than ten bytes"))


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_never_do_worse_than_an_affine_error(data):
    with contextlib.suppress(AffineError):
        load(data)


def test_mutated_real_streams_never_do_worse_than_an_affine_error():
    rng = random.Random(5)
    value = {
        "a": [Fragment(), {1: (2, 3.5, None, True)}, collections.OrderedDict(x=b"bytes")],
        "s": {1, 2},
        "n": 10**30,
    }
    outcomes = collections.Counter()
    for protocol in (0, 2, 4):
        data = pickle.dumps(value, protocol=protocol)
        pickletools.dis(data, out=io.StringIO())
        for _ in range(1500):
            broken = bytearray(data)
            for _ in range(rng.randint(1, 3)):
                broken[rng.randrange(len(broken))] = rng.randrange(256)
            try:
                load(bytes(broken[: rng.randint(1, len(broken))] if rng.random() < 0.3 else broken))
                outcomes["read"] += 1
            except AffineError:
                outcomes["refused"] += 1
    assert outcomes["refused"] > 1000
    assert outcomes["read"] > 100


def test_every_opcode_of_python_has_a_handler():
    known = set(unpickle._HANDLERS) | {pickle.STOP[0]}
    missing = {op.name for op in pickletools.opcodes if ord(op.code) not in known}
    assert missing == set()
    assert os.path.basename(unpickle.__file__) == "unpickle.py"
