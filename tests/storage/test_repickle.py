"""Objects written again without their classes: the whole file equals torch.save's of the live objects."""

import argparse
import collections
import dataclasses
import enum
import errno
import os
import pickle
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stored import save_objects

from deepspeed_affine.errors import CheckpointFormatError, UnsupportedLayoutError
from deepspeed_affine.storage.numpy_values import numpy_value
from deepspeed_affine.storage.pt_reader import load_pickle
from deepspeed_affine.storage.pt_writer import NewTensor
from deepspeed_affine.storage.refs import Global, StandIn

MODULE = "vanishing_classes"
SUPPORT = Path(__file__).parents[1] / "support"


@dataclasses.dataclass
class Fragment:
    numel: int
    start: int


@dataclasses.dataclass(frozen=True, slots=True)
class SlottedShape:
    patterns: list
    shape: tuple


class Scaler:
    def __init__(self):
        self.cur_scale = 65536.0
        self.cur_hysteresis = 2
        self.dtype = torch.float16
        self.helper = Fragment(3, 4)


class Stage(enum.Enum):
    DISABLED = 0
    GRADIENTS = 2


class Names(dict):
    pass


class Row(list):
    pass


Pair = collections.namedtuple("Pair", "left right")

CLASSES = (Fragment, SlottedShape, Scaler, Stage, Names, Row, Pair)


@pytest.fixture
def vanishing(monkeypatch):
    """Puts the classes above into a module that can be taken away."""
    module = types.ModuleType(MODULE)
    for cls in CLASSES:
        monkeypatch.setattr(cls, "__module__", MODULE)
        setattr(module, cls.__name__, cls)
    monkeypatch.setitem(sys.modules, MODULE, module)
    return lambda: monkeypatch.delitem(sys.modules, MODULE)


def round_trip(tmp_path, value, edit=lambda root: root, vanish=lambda: None):
    """Save, let torch load, edit and save again; do the same our way; return both files' bytes."""
    first, stock, ours = tmp_path / "first.pt", tmp_path / "stock" / "x.pt", tmp_path / "ours" / "x.pt"
    for path in (stock, ours):
        path.parent.mkdir(exist_ok=True)
    torch.save(value, first)
    torch.save(edit(torch.load(first, map_location="cpu", weights_only=False)), stock)
    vanish()
    save_objects(ours, edit(load_pickle(first).root))
    return stock.read_bytes(), ours.read_bytes()


def test_objects_of_classes_that_are_gone(tmp_path, vanishing):
    shared = Fragment(1, 2)
    scaler = Scaler()
    value = {
        "loss_scaler": scaler,
        "again": scaler,
        "cur_scale": "cur_scale",
        "numel": ["numel", "start"],
        "mappings": [collections.OrderedDict(a=shared, b=Fragment(5, 6)), {"a": shared}],
        "shape": SlottedShape(["p"], ((2, 4), 1)),
        "stage": [Stage.GRADIENTS, Stage.DISABLED, Stage.GRADIENTS],
        "names": Names(x=1, y=[2]),
        "row": Row([1, 2, 3]),
        "pair": Pair(1, torch.ones(2)),
        "classes": (Fragment, Stage, torch.Tensor, collections.OrderedDict),
    }
    stock, ours = round_trip(tmp_path, value, vanish=vanishing)
    assert MODULE not in sys.modules
    assert ours == stock


def test_command_line_namespaces(tmp_path):
    args = argparse.Namespace(hidden_size=8, some_option_of_nobody=[1], lr=0.1)
    value = {"args": args, "lr": "some_option_of_nobody", "keys": ["hidden_size", "some_option_of_nobody"]}
    stock, ours = round_trip(tmp_path, value)
    assert ours == stock


TENSORS = {
    "shared storage": lambda: (lambda base: [base, base[2:], base.view(5, 2).t(), base])(torch.arange(10.0)),
    "empty ones unshared": lambda: (lambda e: [e, e.view(0, 2), torch.empty(0)])(torch.empty(0)),
    "every kind": lambda: {
        "p": torch.nn.Parameter(torch.ones(3)),
        "frozen": torch.nn.Parameter(torch.ones(3), requires_grad=False),
        "grad": torch.ones(2, requires_grad=True),
        "meta": torch.empty(2, 3, device="meta"),
        "fp8": torch.ones(4).to(torch.float8_e5m2),
        "bf16": torch.ones(4, dtype=torch.bfloat16),
        "size": torch.Size([1, 2]),
        "device": torch.device("cpu"),
        "dtypes": [torch.float32, torch.float32, torch.bfloat16],
        "scalar": torch.tensor(5),
        "sparse": torch.eye(3).to_sparse(),
        "quantized": torch.quantize_per_tensor(torch.ones(3), 0.1, 2, torch.qint8),
        "conj": torch.ones(2, dtype=torch.complex64).conj(),
    },
    "state dict": lambda: torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.LayerNorm(3)).state_dict(),
    "optimizer": lambda: torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))]).state_dict(),
    "generator": lambda: {"rng": torch.get_rng_state()},
    "storages by themselves": lambda: (
        lambda t, b, w: [t, t._typed_storage(), t._typed_storage(), b.untyped_storage(), b, w, w.untyped_storage()]
    )(torch.ones(3), torch.ones(5).byte(), torch.ones(4).to(torch.uint16)),
    "empty storages by themselves": lambda: (
        lambda e: [e, e.untyped_storage(), e.untyped_storage(), e._typed_storage(), e._typed_storage()]
    )(torch.empty(0)),
    "a part of nothing": lambda: (lambda base: [base[:0], base, base[4:], base[:0]])(torch.ones(4)),
    "more keys than one byte counts": lambda: [torch.full((n % 3,), n) for n in range(400)],
    "keys as strings": lambda: ["0", torch.ones(1), "1", torch.ones(2), "cpu", "storage", "10", torch.ones(3)],
    "many extents": lambda: torch.ones(2, 1, 3, 1, 2).permute(4, 0, 1, 2, 3),
    "complex with a lazy sign": lambda: [torch.ones(2, dtype=torch.complex64).conj().imag],
    "csr": lambda: torch.eye(3).to_sparse_csr(),
    "per channel": lambda: torch.quantize_per_channel(
        torch.ones(2, 2), torch.tensor([0.1, 0.2]), torch.tensor([0, 1]), 0, torch.quint8
    ),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors(tmp_path, name):
    stock, ours = round_trip(tmp_path, TENSORS[name]())
    assert ours == stock


def test_tensors_with_attributes(tmp_path):
    flat = torch.arange(6.0, requires_grad=True)
    flat.ds_id = "0_3"
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.tag = {"ds_id": flat}
    meta = torch.empty(2, 3, device="meta", requires_grad=True)
    meta.ds_id = "meta"
    frozen = torch.nn.Parameter(torch.empty(4, device="meta"), requires_grad=False)
    frozen.tag = 1
    small = torch.ones(2).to(torch.float8_e5m2)
    small.scale = torch.ones(1)
    value = {"flat": flat, "p": parameter, "ds_id": "ds_id", "same": flat, "meta": [meta, frozen, meta], "small": small}
    stock, ours = round_trip(tmp_path, value)
    assert ours == stock


def test_bulk_batches_of_the_c_pickler(tmp_path):
    value = []
    for count in (0, 1, 2, 999, 1000, 1001, 2000, 2001):
        numbers = list(range(count))
        value += [numbers, tuple(numbers), dict.fromkeys(numbers), collections.OrderedDict.fromkeys(numbers)]
    stock, ours = round_trip(tmp_path, [value, [str(number) for number in range(70_000)]])
    assert ours == stock


def test_every_plain_type(tmp_path):
    value = [
        *(sign * 2**power + step for power in range(0, 70, 3) for sign in (1, -1) for step in (-1, 0, 1)),
        2**2100,
        -(2**2100),
        0.1,
        float("inf"),
        "",
        "é",
        "\ud800",
        "a" * 70_000,
        b"",
        b"latin1 \xff",
        bytearray(b"x"),
        bytearray(),
        {1, 2},
        frozenset([3]),
        set(),
        1 + 2j,
        range(3),
        slice(1, None),
        collections.Counter("aab"),
        collections.defaultdict(list, a=[1]),
        collections.deque([1], maxlen=3),
        len,
        getattr,
        int,
        collections.OrderedDict,
    ]
    stock, ours = round_trip(tmp_path, value)
    assert ours == stock


def test_numpy_values_are_shared_as_numpy_shares_them(tmp_path):
    array = np.arange(6.0).reshape(2, 3)
    value = {
        "array": array,
        "again": array,
        "fortran": np.asfortranarray(array),
        "scalar": array[0, 1],
        "scalars": [np.float64(2), np.int32(1), np.bool_(True)],
        "other": np.ones(2),
        "dtype": np.dtype("f8"),
        "empty": np.zeros((0, 3), dtype=np.int16),
        "text": np.array(["a", "bc"]),
        "swapped": np.arange(3, dtype=">i4"),
        "state": np.random.RandomState(3).get_state(),
    }
    stock, ours = round_trip(tmp_path, value)
    assert ours == stock
    root = load_pickle(tmp_path / "first.pt").root
    assert numpy_value(root["scalar"]) == 1.0
    assert np.array_equal(numpy_value(root["array"]), array)
    assert numpy_value(root["swapped"]).tolist() == [0, 1, 2]
    assert numpy_value(root["text"]) is None


def test_numpy_ingredients_are_checked():
    dtype = StandIn(Global("numpy", "dtype"), ("f8", False, True))
    dtype.stand_in_state = (3, "<", None, None, None, -1, -1, 0)
    for args in ((dtype, b"short"), (dtype, "text"), (dtype,), (None, b"12345678")):
        assert numpy_value(StandIn(Global("numpy.core.multiarray", "scalar"), args)) is None
    assert numpy_value(StandIn(Global("numpy.core.multiarray", "scalar"), (dtype, bytes(8)))) == 0
    for code in ("O8", "V8", "f99", "f", "i" * 50, 3):
        bad = StandIn(Global("numpy", "dtype"), (code, False, True))
        bad.stand_in_state = dtype.stand_in_state
        assert numpy_value(bad) is None
    array = StandIn(Global("numpy.core.multiarray", "_reconstruct"), (Global("numpy", "ndarray"), (0,), b"b"))
    for state in ((1, (10**12,), dtype, False, b""), (1, (-1,), dtype, False, b""), (1, (1,), dtype, False, [1]), None):
        array.stand_in_state = state
        assert numpy_value(array) is None


atoms = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.binary(max_size=4)
names = st.sampled_from(["a", "numel", "start", "cpu", "storage", "lr", "ab"])


@st.composite
def graphs(draw):
    """A graph with sharing: later parts are built from earlier ones, drawn with repetition."""
    pool = draw(st.lists(atoms | names, min_size=1, max_size=6))
    flat = torch.arange(4.0, requires_grad=True)
    flat.numel_of = flat.detach()[1:]
    tagged = torch.nn.Parameter(torch.ones(2, 3))
    tagged.lr = pool[0]
    pool += [
        flat.detach(),
        torch.ones(2)[:1],
        flat,
        tagged,
        tagged.data.t(),
        torch.empty(0),
        torch.ones(2, device="meta"),
    ]
    pool += [torch.ones(3).to(torch.float8_e4m3fn), torch.nn.Parameter(flat.detach()[:2], requires_grad=False)]
    pick = st.integers(0, 10**6)
    for _ in range(draw(st.integers(1, 15))):
        parts = [pool[draw(pick) % len(pool)] for _ in range(draw(st.integers(0, 4)))]
        kind = draw(st.integers(0, 6))
        if kind == 0:
            made = list(parts)
        elif kind == 1:
            made = tuple(parts)
        elif kind == 2:
            made = {draw(names): part for part in parts}
        elif kind == 3:
            made = collections.OrderedDict((draw(names), part) for part in parts)
        elif kind == 4:
            made = Fragment(parts, draw(names))
        elif kind == 5:
            made = Pair(parts[:1], tuple(parts))
        else:
            made = torch.arange(6.0)[draw(st.integers(0, 3)) :]
        pool.append(made)
    return pool


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(graphs())
def test_any_graph_is_written_again_as_torch_writes_it(tmp_path, vanishing, graph):
    stock, ours = round_trip(tmp_path, graph)
    assert ours == stock


def test_edits_between_reading_and_writing(tmp_path):
    def edit(root):
        out = {key: value for key, value in root["optimizer"].items() if key != "big"}
        out["group_paddings"] = [0, 0]
        out["param_groups"] = root["optimizer"]["inner"]["param_groups"]
        out["moved"] = [out.pop("t"), root["optimizer"]["t"]]
        return out

    inner = {"param_groups": [{"lr": 0.1, "betas": (0.9, 0.95), "params": [0]}]}
    value = {"optimizer": {"inner": inner, "big": torch.ones(1000), "group_paddings": [1, 2], "t": torch.ones(3)}}
    stock, ours = round_trip(tmp_path, value, edit)
    assert ours == stock
    assert len(ours) < 4000


def test_what_protocol_2_cannot_say_is_refused(tmp_path):
    stand_in = StandIn(Global("m", "C"), (1,), "newobj_ex", {"a": 2})
    with pytest.raises(UnsupportedLayoutError, match="keyword arguments"):
        save_objects(tmp_path / "x.pt", stand_in)
    with pytest.raises(UnsupportedLayoutError, match="local object"):
        save_objects(tmp_path / "x.pt", lambda: None)
    deep = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(UnsupportedLayoutError, match="nested deeper"):
        save_objects(tmp_path / "x.pt", deep)


@pytest.mark.parametrize(
    "live",
    [torch.ones(2), torch.nn.Parameter(torch.ones(2)), torch.ones(2).untyped_storage(), torch.ones(2)._typed_storage()],
    ids=["tensor", "parameter", "storage", "typed storage"],
)
def test_live_tensors_are_refused(tmp_path, live):
    with pytest.raises(UnsupportedLayoutError, match="a live"):
        save_objects(tmp_path / "x.pt", {"a": [live]})
    assert not (tmp_path / "x.pt").exists()


def test_gadgets_are_written_again_and_never_run(tmp_path):
    target = tmp_path / "made"

    class Gadget:
        def __reduce__(self):
            return (os.system, (f"touch {target}",))

    torch.save([Gadget()], tmp_path / "x.pt")
    save_objects(tmp_path / "y.pt", load_pickle(tmp_path / "x.pt").root)
    assert not target.exists()
    assert pickle.loads(pickle.dumps(load_pickle(tmp_path / "y.pt").root))[0].stand_in_args == (f"touch {target}",)


WITHOUT_TORCH = """
import re, sys
sys.path.insert(0, sys.argv[3])
from deepspeed_affine.storage.pt_reader import load_pickle
from stored import save_objects
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
root = load_pickle(sys.argv[1]).root
before = peak()
save_objects(sys.argv[2], root)
print(peak() - before, any(name in sys.modules for name in ("torch", "mmap")))
"""


def test_writing_a_large_object_takes_no_memory_and_no_torch(tmp_path):
    path, copy = tmp_path / "x.pt", tmp_path / "y" / "x.pt"
    copy.parent.mkdir()
    torch.save({"fp32": torch.ones(24 << 20), "k": torch.ones(8), "large": torch.ones(11 << 20).byte()}, path)
    command = [sys.executable, "-c", WITHOUT_TORCH, str(path), str(copy), str(SUPPORT)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    kibibytes, imported = done.stdout.split()
    assert imported == "False"
    assert int(kibibytes) < 12 * 1024
    assert copy.read_bytes() == path.read_bytes()


def test_a_source_cut_short_meanwhile_is_named(tmp_path):
    torch.save({"k": torch.ones(1000)}, tmp_path / "x.pt")
    root = load_pickle(tmp_path / "x.pt").root
    os.truncate(tmp_path / "x.pt", 2000)
    with pytest.raises(CheckpointFormatError, match=r"x\.pt: ends at byte 2000"):
        save_objects(tmp_path / "y.pt", root)


def test_a_full_disk_is_an_error_that_names_the_output(tmp_path, monkeypatch):
    torch.save({"k": torch.ones(1000)}, tmp_path / "x.pt")
    root = load_pickle(tmp_path / "x.pt").root
    real, calls = os.pwrite, []

    def failing(fd, data, offset):
        calls.append(len(data))
        if len(calls) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data[:100], offset)

    monkeypatch.setattr(os, "pwrite", failing)
    with pytest.raises(OSError, match="No space left on device") as caught:
        save_objects(tmp_path / "y.pt", root)
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(tmp_path / "y.pt"))


def test_writes_the_system_cuts_short_are_continued(tmp_path, monkeypatch):
    value = {"k": torch.arange(1000.0), "e": torch.ones(3)}
    torch.save(value, tmp_path / "x.pt")
    (tmp_path / "y").mkdir()
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: real(fd, data[:77], offset))
    save_objects(tmp_path / "y" / "x.pt", load_pickle(tmp_path / "x.pt").root)
    assert (tmp_path / "y" / "x.pt").read_bytes() == (tmp_path / "x.pt").read_bytes()


def test_placeholders_have_nothing_to_copy(tmp_path):
    with pytest.raises(UnsupportedLayoutError, match="no file stores"):
        save_objects(tmp_path / "x.pt", [NewTensor("float32", (2,))])


STOCK = """
import sys, torch, deepspeed
from pathlib import Path
for number, name in enumerate(sys.argv[2:]):
    torch.save(torch.load(name, map_location="cpu", weights_only=False), Path(sys.argv[1]) / f"{number}.pt")
"""
OURS = """
import sys
from pathlib import Path
sys.modules["deepspeed"] = None
sys.path.insert(0, {support!r})
from deepspeed_affine.storage.pt_reader import load_pickle
from stored import save_objects
for number, name in enumerate(sys.argv[2:]):
    save_objects(Path(sys.argv[1]) / f"{{number}}.pt", load_pickle(name).root)
"""


@pytest.mark.real
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_real_checkpoints_without_deepspeed(tmp_path, stage, dtype):
    script = Path(__file__).with_name("train_tiny.py")
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script)]
    run += ["--out", str(tmp_path / "c"), "--stage", str(stage), "--dtype", dtype]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(run, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    files = sorted(str(path) for path in (tmp_path / "c" / "step").glob("*.pt"))
    assert len(files) == (4 if stage == 3 else 3)
    for name, code in (("stock", STOCK), ("ours", OURS.format(support=str(SUPPORT)))):
        (tmp_path / name).mkdir()
        subprocess.run([sys.executable, "-c", code, str(tmp_path / name), *files], check=True, env=environment)
    for number in range(len(files)):
        assert (tmp_path / "ours" / f"{number}.pt").read_bytes() == (tmp_path / "stock" / f"{number}.pt").read_bytes()
