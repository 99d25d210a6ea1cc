"""Writing: the plan's numbers, any order of pieces, splits, refusals, and what is left when something goes wrong."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import DATA, ID, entry, part, small, small_payload

from deepspeed_affine import ninfer
from deepspeed_affine.errors import AffineError, PolicyError
from deepspeed_affine.ninfer.fileplan import part_name, plan_files, plan_objects, split_payload
from deepspeed_affine.ninfer.parse import directory_of
from deepspeed_affine.storage.private import PrivateFolder

TEXT = {"text": ninfer.Component({})}


def listing(folder):
    return sorted(path.name for path in Path(folder).iterdir())


def specs_of(artifact):
    return [
        ninfer.TensorSpec(r.id, r.shape, r.format, r.divisors)
        if isinstance(r, ninfer.TensorObject)
        else ninfer.ResourceSpec(r.id, r.nbytes)
        for r in artifact.objects.values()
    ]


def rewrite(source, target, *, limit=None, seed=0, chunk=997):
    """The artifact written again, in shuffled chunks."""
    with ninfer.Writer(
        target,
        specs_of(source),
        source.components,
        source.bindings,
        source.uses,
        metadata=source.metadata,
        provenance=source.provenance,
        max_file_bytes=limit,
        durable=False,
    ) as writer:
        pieces = []
        for object_id in source.objects:
            data = source.read_encoded(object_id)
            pieces += [(object_id, at, data[at : at + chunk]) for at in range(0, len(data), chunk)]
        random.Random(seed).shuffle(pieces)
        for object_id, at, data in pieces:
            writer.write(object_id, data, at)


LIMITS = list(range(8192, 40_961, 4096))


@pytest.mark.parametrize("limit", [None, *LIMITS])
def test_an_artifact_written_again_is_the_same_at_every_limit(limit, tmp_path):
    with ninfer.open(DATA / "allfmt.ninfer") as source:
        rewrite(source, tmp_path / "x.ninfer", limit=limit, seed=limit or 1)
        with ninfer.open(tmp_path / "x.ninfer") as made:
            assert made.read_payload(0, made.payload_bytes) == source.read_payload(0, source.payload_bytes)
            same = {key: value for key, value in source.directory.to_json().items() if key != "files"}
            assert {key: value for key, value in made.directory.to_json().items() if key != "files"} == same
            assert made.artifact_id != source.artifact_id
            made.validate()
            expected = ["x.ninfer", *(part_name("x.ninfer", n) for n in range(1, len(made.files)))]
            sizes = [os.path.getsize(tmp_path / name) for name in expected]
    assert listing(tmp_path) == expected
    if limit:
        assert max(sizes) <= limit
    else:
        assert len(expected) == 1


@pytest.mark.parametrize("limit", [None, *LIMITS])
def test_resharding_copies_the_payload(limit, tmp_path):
    directory = ninfer.reshard_files(DATA / "allfmt_split.ninfer", tmp_path / "y", limit, durable=False)
    with ninfer.open(DATA / "allfmt.ninfer") as source, ninfer.open(tmp_path / "y") as made:
        assert made.read_payload(0, made.payload_bytes) == source.read_payload(0, source.payload_bytes)
        assert [record.to_json() for record in made.files] == [record.to_json() for record in directory.files]
        made.validate()


def test_resharding_carries_gaps_a_tail_and_what_nobody_here_knows(tmp_path):
    unknown = dict(small()["objects"][0], format="gguf_q4", layout="gguf_blocks_v1")
    payload = bytearray(small_payload()) + b"tail"
    payload[100] = 9
    root = small(objects=[unknown, *small()["objects"][1:]], files=[{"path": None, "payload_bytes": 269}])
    (tmp_path / "a").write_bytes(entry(root, bytes(payload)))
    ninfer.reshard_files(tmp_path / "a", tmp_path / "b")
    with ninfer.open(tmp_path / "b") as made:
        assert made.read_payload(0, 269) == payload
        assert made.objects["w"].to_json() == unknown


@pytest.mark.parametrize(
    ("payload", "start", "limit", "sizes"),
    [
        (5000, 4096, None, [5000]), (5000, 4096, 8192, [4096, 904]), (5000, 4096, 12288, [5000]),
        (32_000_000_000, 4096, 32_000_000_000, [31_999_995_904, 4096]),
        (31_999_934_464 + 4096, 65_536, 32_000_000_000, [31_999_934_464, 4096]),
        (140_246_016, 65_536, 64_000_000, [63_934_464, 63_995_904, 12_315_648]),
        (8192, 4096, 8192, [4096, 4096]), (5000, 4096, 9096, [5000]),
    ],
)  # fmt: skip
def test_the_split(payload, start, limit, sizes):
    assert split_payload(payload, start, limit) == sizes


@pytest.mark.parametrize("limit", [1, 4095, 4096, 4097, 8191])
def test_limits_without_room_for_a_page(limit):
    with pytest.raises(ninfer.WriterError):
        split_payload(5000, 4096, limit)


def attention_model(mixed):
    """The objects of the format's examples 12.1 and 12.2, in their order."""
    resources = [("tokenizer", 12_809_320), ("tokenizer_config", 17_928), ("chat_template", 8_952), ("generation", 202)]
    specs = [ninfer.ResourceSpec(f"r.{name}", size) for name, size in resources]

    def matrix(name, *shape, kind="bf16"):
        specs.append(ninfer.TensorSpec(f"w.{name}", shape, kind))

    matrix("embedding", 248_320, 128)
    matrix("final_norm", 128)
    matrix("head", 248_320, 128)
    matrix("input_norm", 128)
    matrix("post_norm", 128)
    if mixed:
        matrix("attn.qk", 256, 128, kind="q4_g64_fp16")
        matrix("attn.gv", 256, 128, kind="q5_g64_fp16")
    else:
        matrix("attn.qkgv", 512, 128)
    matrix("q_norm", 128)
    matrix("k_norm", 128)
    matrix("attn.out", 128, 128)
    matrix("ffn.gate_up", 512, 128)
    matrix("ffn.down", 128, 256)
    return specs


def model_bindings(mixed):
    rows = 128 * 128
    names = ("query", "key", "gate", "value")
    if mixed:
        places = [("w.attn.qk", 0), ("w.attn.qk", rows), ("w.attn.gv", 0), ("w.attn.gv", rows)]
    else:
        places = [("w.attn.qkgv", n * rows) for n in range(4)]
    found = {
        f"text/layers/0/attention/{name}": ninfer.Binding(parts=(ninfer.Part(owner, at, at + rows),))
        for name, (owner, at) in zip(names, places, strict=True)
    }
    for n, name in enumerate(("gate", "up")):
        found[f"text/layers/0/mlp/{name}"] = ninfer.Binding(
            parts=(ninfer.Part("w.ffn.gate_up", n * 2 * rows, (n + 1) * 2 * rows),)
        )
    for name in (
        "embedding",
        "final_norm",
        "head",
        "input_norm",
        "post_norm",
        "q_norm",
        "k_norm",
        "attn.out",
        "ffn.down",
    ):
        found[f"text/{name}"] = ninfer.Binding(f"w.{name}")
    return found


def test_the_objects_of_example_12_2_are_where_it_says():
    found = [(record.offset, record.nbytes) for record in plan_objects(attention_model(mixed=True))]
    assert [offset for offset, _ in found] == [
        0, 12_809_320, 12_827_248, 12_836_200, 12_836_608, 76_406_528, 76_406_784, 139_976_704, 139_976_960,
        139_977_216, 139_994_624, 140_016_128, 140_016_384, 140_016_640, 140_049_408, 140_180_480,
    ]  # fmt: skip
    assert sum(found[-1]) == 140_246_016


@pytest.mark.parametrize("mixed", [False, True])
def test_examples_12_1_and_12_2(mixed):
    records = plan_objects(attention_model(mixed))
    roles = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"]
    config = {
        "architectures": ["Qwen3_5ForCausalLM"],
        "hidden_size": 128,
        "intermediate_size": 256,
        "vocab_size": 248_320,
    }
    resources = dict(zip(roles, [record.id for record in records[:4]], strict=True))
    components = {"text": ninfer.Component(config, None, resources)}
    uses = [ninfer.Use(name, f"{name}/input", "A16Only") for name in model_bindings(mixed) if "attention" in name]

    def make(files):
        return ninfer.Directory(components, records, model_bindings(mixed), uses, files)

    payload = records[-1].offset + records[-1].nbytes
    plan = plan_files(make, payload, "model.ninfer", 64_000_000 if mixed else None, reserve=65_504)
    assert plan.start == 65_536
    assert len(plan.text) == 65_504
    sizes = [record.payload_bytes for record in plan.directory.files]
    assert sizes == ([63_934_464, 63_995_904, 12_315_648] if mixed else [payload])
    shapes = {f"text/layers/0/attention/{name}": ((128, 128), None) for name in ("query", "key", "gate", "value")}
    bound = ninfer.bind(plan.directory, shapes, ["text"])
    assert len({record.id for p in bound.parameters.values() for record, _, _ in p.parts}) == (2 if mixed else 1)
    assert directory_of(plan.directory.to_json(), "model.ninfer").to_json() == plan.directory.to_json()


def test_the_directory_grows_with_its_own_table(tmp_path):
    """Hundreds of continuations need more room than was kept for one file, and the split is planned again."""
    names = {f"p{n}": ninfer.Binding("w") for n in range(100)}
    with ninfer.Writer(
        tmp_path / "a",
        [ninfer.TensorSpec("w", (1000, 1000), "fp32")],
        TEXT,
        names,
        max_file_bytes=32_768,
        durable=False,
    ) as writer:
        values = np.arange(1_000_000, dtype=np.float32).reshape(1000, 1000)
        writer.write_values("w", values)
    with ninfer.open(tmp_path / "a") as made:
        assert made.payload_offset > 8192
        assert max(path.stat().st_size for path in tmp_path.iterdir()) <= 32_768
        assert np.array_equal(made.read_parameter("p7"), values)


def test_names_beyond_9999():
    assert part_name("m.ninfer", 7) == "m.ninfer.part-0007"
    assert part_name("m.ninfer", 10_000) == "m.ninfer.part-10000"


FORMATS = ["bf16", "fp32", "int32", "q4_g64_fp16", "q5_g64_fp16", "q6_g64_fp16", "q8_g32_fp16", "t2_g128_fp16",
           "fp8_e4m3fn_row_bf16", "nvfp4"]  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_values_written_are_values_encoded(name, tmp_path):
    rng = np.random.default_rng(1)
    values = rng.normal(size=(384, 192)).astype(np.float32)
    if name == "bf16":
        values = ninfer.bf16_to_float32(ninfer.round_to_bf16(values))
    elif name == "int32":
        values = rng.integers(-9, 9, (384, 192), dtype=np.int32)
    elif name == "t2_g128_fp16":
        values = np.sign(values)
    divisors = 3 if name == "nvfp4" else 1
    specs = [ninfer.ResourceSpec("r", 3), ninfer.TensorSpec("w", values.shape, name, divisors)]
    with ninfer.Writer(tmp_path / "a", specs, TEXT, {"w": ninfer.Binding("w")}, max_file_bytes=20_480) as writer:
        writer.write_values("w", values)
        writer.write("r", b"abc")
    with ninfer.open(tmp_path / "a") as made:
        assert made.read_encoded("w") == ninfer.encode(name, values, divisors).tobytes()
        assert made.read("r") == b"abc"
        made.validate()


def test_many_threads_write_one_object(tmp_path):
    values = np.random.default_rng(2).normal(size=(512, 128)).astype(np.float32)
    with ninfer.Writer(tmp_path / "a", [ninfer.TensorSpec("w", values.shape, "q5_g64_fp16")], TEXT) as writer:
        threads = [
            threading.Thread(target=writer.write_rows, args=("w", row, values[row : row + 64]))
            for row in range(0, 512, 64)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    with ninfer.open(tmp_path / "a") as made:
        assert made.read_encoded("w") == ninfer.encode("q5_g64_fp16", values).tobytes()


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=12))
def test_every_byte_is_written_exactly_once(pairs):
    from deepspeed_affine.ninfer.writer import _Coverage

    covered, model = _Coverage(20), set()
    for offset, count in pairs:
        wanted = set(range(offset, offset + count))
        if offset + count > 20 or wanted & model:
            with pytest.raises(ninfer.WriterError):
                covered.add("w", offset, count)
        else:
            covered.add("w", offset, count)
            model |= wanted
    if len(model) == 20:
        covered.require_whole("w")
    else:
        with pytest.raises(ninfer.WriterError):
            covered.require_whole("w")


def simple(path, **options):
    return ninfer.Writer(path, [ninfer.TensorSpec("w", (2000,), "fp32")], TEXT, durable=False, **options)


WORDS = np.arange(2000, dtype=np.float32)
WRONG = {
    "past the end": lambda w: w.write("w", bytes(8001)),
    "before the start": lambda w: w.write("w", b"x", -1),
    "twice": lambda w: (w.write("w", bytes(10)), w.write("w", bytes(10), 9)),
    "unknown": lambda w: w.write("x", b"x"),
    "shape": lambda w: w.write_values("w", WORDS[:1999]),
    "rows of words": lambda w: w.write_rows("w", 0, WORDS[None]),
    "type": lambda w: w.write_values("w", WORDS.astype(np.float64)),
    "not all": lambda w: w.write("w", bytes(7999)),
    "nothing": lambda w: None,
}


@pytest.mark.parametrize("name", WRONG)
def test_a_failed_write_leaves_nothing(name, tmp_path):
    with pytest.raises(AffineError), simple(tmp_path / "a", max_file_bytes=8192) as writer:
        WRONG[name](writer)
    assert listing(tmp_path) == []


def test_an_exception_of_the_producer_leaves_nothing(tmp_path):
    def produce(writer):
        writer.write("w", WORDS)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), simple(tmp_path / "a") as writer:
        produce(writer)
    assert listing(tmp_path) == []


def test_a_closed_writer_takes_nothing(tmp_path):
    writer = simple(tmp_path / "a")
    writer.write_values("w", WORDS)
    writer.finish()
    for call in (lambda: writer.write("w", b"x"), writer.finish):
        with pytest.raises(ninfer.WriterError):
            call()
    writer.abort()
    assert listing(tmp_path) == ["a"]


@pytest.mark.parametrize("taken", ["a", "a.part-0001"])
def test_nothing_is_overwritten(taken, tmp_path):
    (tmp_path / taken).write_bytes(b"mine")
    with pytest.raises(ninfer.OutputExistsError) as caught:
        simple(tmp_path / "a", max_file_bytes=8192)
    assert isinstance(caught.value, FileExistsError)
    assert isinstance(caught.value, ninfer.WriterError)
    assert listing(tmp_path) == [taken]
    assert (tmp_path / taken).read_bytes() == b"mine"


def write_while_taking(writer, name):
    writer.write_values("w", WORDS)
    name.write_bytes(b"mine")


@pytest.mark.parametrize("taken", ["a", "a.part-0001"])
def test_a_name_taken_meanwhile_is_not_overwritten(taken, tmp_path):
    with pytest.raises(ninfer.OutputExistsError), simple(tmp_path / "a", max_file_bytes=8192) as writer:
        write_while_taking(writer, tmp_path / taken)
    assert listing(tmp_path) == [taken]
    assert (tmp_path / taken).read_bytes() == b"mine"


def test_file_systems_without_links(tmp_path, monkeypatch):
    import errno

    def refuse(*args, **kwargs):
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    with simple(tmp_path / "a", max_file_bytes=8192) as writer:
        writer.write_values("w", WORDS)
    assert listing(tmp_path) == ["a", "a.part-0001"]
    with pytest.raises(ninfer.OutputExistsError), simple(tmp_path / "b", max_file_bytes=8192) as writer:
        write_while_taking(writer, tmp_path / "b")
    assert listing(tmp_path) == ["a", "a.part-0001", "b"]


@pytest.mark.parametrize(
    "make",
    [
        lambda: [ninfer.TensorSpec("w", (4,), "fp32")] * 2, lambda: [],
        lambda: [ninfer.TensorSpec("w", (4,), "q4_g64_fp16")],
        lambda: [ninfer.TensorSpec("w", (4, 4), "fp32", 2)], lambda: [ninfer.ResourceSpec("r", 0)],
        lambda: [ninfer.TensorSpec("w", (0,), "fp32")], lambda: [ninfer.TensorSpec("w", (4,), "new")],
        lambda: [ninfer.TensorSpec("", (4,), "fp32")],
    ],
)  # fmt: skip
def test_bad_plans_touch_no_disk(make, tmp_path):
    with pytest.raises(AffineError):
        ninfer.Writer(tmp_path / "a", make(), TEXT)
    with pytest.raises(AffineError):
        ninfer.Writer(tmp_path / "a", [ninfer.TensorSpec("w", (4,), "fp32")], TEXT, {"p": ninfer.Binding("x")})
    with pytest.raises(AffineError):
        ninfer.Writer(tmp_path / "a", [ninfer.TensorSpec("w", (4,), "fp32")], TEXT, max_file_bytes=0)
    assert listing(tmp_path) == []


def test_one_writer_at_a_time(tmp_path):
    with simple(tmp_path / "a") as writer:
        with pytest.raises(PolicyError, match="running"):
            simple(tmp_path / "a")
        writer.write_values("w", WORDS)
    assert listing(tmp_path) == ["a"]


def test_leftovers_of_a_killed_publication_go_and_foreign_files_stay(tmp_path):
    import json

    private = PrivateFolder.take(str(tmp_path / "a"))
    note = {"ninfer": {"artifact_id": ID.hex(), "parts": ["a.part-0001", "a.part-0002", "a.part-0003"]}}
    Path(private.marker).write_text(json.dumps(note))
    private.release()
    (tmp_path / "a.part-0001").write_bytes(part(1, b"x"))
    (tmp_path / "a.part-0002").write_bytes(part(2, b"x", bytes(16)))
    (tmp_path / "a.part-0003").write_bytes(b"a person's notes")
    with simple(tmp_path / "a") as writer:
        writer.write_values("w", WORDS)
    assert listing(tmp_path) == ["a", "a.part-0002", "a.part-0003"]


def test_a_conversions_private_folder_is_left_alone(tmp_path):
    private = PrivateFolder.take(str(tmp_path / "a"))
    Path(private.marker).write_text('{"step": "old"}')
    private.release()
    with pytest.raises(PolicyError):
        simple(tmp_path / "a")
    assert Path(private.marker).exists()


@pytest.mark.parametrize(
    "note",
    [
        b"", b"[]", b"{}", b'{"ninfer": null}', b'{"ninfer": {"artifact_id": 1, "parts": []}}',
        b'{"ninfer": {"artifact_id": "00", "parts": "a"}}', b'{"ninfer": {"artifact_id": "00", "parts": [1]}}',
        b'{"ninfer": {"artifact_id": "00", "parts": ["../mine"]}}',
    ],
)  # fmt: skip
def test_a_note_of_nothing_we_know_removes_nothing(note, tmp_path):
    private = PrivateFolder.take(str(tmp_path / "a"))
    Path(private.marker).write_bytes(note)
    private.release()
    (tmp_path / "mine").write_bytes(part(1, b"x"))
    before = listing(tmp_path)
    with pytest.raises(PolicyError):
        simple(tmp_path / "a")
    assert listing(tmp_path) == before
    assert Path(private.marker).read_bytes() == note


def test_a_leftover_that_is_no_file_stays(tmp_path):
    import json

    names = ["a.part-0001", "a.part-0002", "a.part-0003", "a.part-0004"]
    private = PrivateFolder.take(str(tmp_path / "a"))
    Path(private.marker).write_text(json.dumps({"ninfer": {"artifact_id": ID.hex(), "parts": names}}))
    private.release()
    (tmp_path / names[0]).write_bytes(part(1, b"x"))
    (tmp_path / names[1]).mkdir()
    os.mkfifo(tmp_path / names[2])
    (tmp_path / "elsewhere").write_bytes(part(4, b"x"))
    (tmp_path / names[3]).symlink_to("elsewhere")
    with simple(tmp_path / "a") as writer:
        writer.write_values("w", WORDS)
    assert listing(tmp_path) == ["a", *names[1:], "elsewhere"]


def test_the_leftovers_of_a_complete_artifact_stay(tmp_path):
    """Killed after the entry appeared: its continuations are its own, and the next run says that it exists."""
    import json

    with simple(tmp_path / "a", max_file_bytes=8192) as writer:
        writer.write_values("w", WORDS)
    private = PrivateFolder.take(str(tmp_path / "a"))
    note = {"artifact_id": writer.artifact_id.hex(), "parts": ["a.part-0001"]}
    Path(private.marker).write_text(json.dumps({"ninfer": note}))
    private.release()
    with pytest.raises(ninfer.OutputExistsError):
        simple(tmp_path / "a", max_file_bytes=8192)
    assert listing(tmp_path) == ["a", "a.part-0001"]
    with ninfer.open(tmp_path / "a") as made:
        made.validate()


def test_more_files_than_a_process_may_open(tmp_path):
    import resource

    values = np.arange(300_000, dtype=np.float32)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Every number below the highest in use is taken, so that what is left is the same whatever ran before.
    taken = [os.open(os.devnull, os.O_RDONLY) for _ in range(max(map(int, os.listdir("/proc/self/fd"))))]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(taken) + 100, hard), hard))
    try:
        bindings = {"p": ninfer.Binding("w")}
        with ninfer.Writer(
            tmp_path / "a",
            [ninfer.TensorSpec("w", (300_000,), "fp32")],
            TEXT,
            bindings,
            max_file_bytes=24_576,
            durable=False,
        ) as writer:
            for begin in range(299_000, -1, -1000):
                writer.write_elements("w", begin, values[begin : begin + 1000])
        with ninfer.open(tmp_path / "a") as made:
            assert len(made.files) > 50
            assert np.array_equal(made.read("w"), values)
            made.validate()
        directory = ninfer.reshard_files(tmp_path / "a", tmp_path / "b", 16_384, durable=False)
        assert len(directory.files) > 90
        with ninfer.open(tmp_path / "b") as made:
            assert np.array_equal(made.read_parameter("p"), values)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for number in taken:
            os.close(number)


def test_records_as_a_directory_spells_them(tmp_path):
    objects = [ninfer.TensorSpec("w", (2, 4), "fp32"), ninfer.ResourceSpec("r", 1)]
    components = {"text": {"config": {"a": 1}, "resources": {"t": "r"}}}
    bindings = {"p": {"parts": [{"object": "w", "range": [4, 8]}]}}
    uses = [{"parameter": "p", "input": "i", "activation_policy": "AllowA4"}]
    with ninfer.Writer(tmp_path / "a", objects, components, bindings, uses) as writer:
        writer.write("w", bytes(32))
        writer.write("r", b"x")
    with ninfer.open(tmp_path / "a") as made:
        said = made.directory.to_json()
        assert (said["components"], said["bindings"], said["uses"]) == (components, bindings, uses)
    with pytest.raises(ninfer.SchemaError):
        ninfer.Writer(tmp_path / "b", objects, {"text": {}}, {})


def test_a_writer_that_could_not_write_says_so_at_its_end(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    def produce(writer):
        monkeypatch.setattr(os, "pwrite", full)
        with pytest.raises(OSError, match="No space"):
            writer.write_values("w", WORDS)
        monkeypatch.undo()

    with pytest.raises(ninfer.WriterError, match="failed"), simple(tmp_path / "a") as writer:
        produce(writer)
    assert listing(tmp_path) == []


def test_the_samples_written_from_their_formula(tmp_path):
    """Every quantised object of ``allfmt`` from its closed form, by our encoders, has the bytes it has there."""
    from samples import EXPECTED

    def matrix(rows, columns, seed):
        r, c = np.mgrid[:rows, :columns]
        values = ((37 * r + 17 * c + 29 * seed) % 211 - 105) / 64
        return np.where((r + c) % 2, -values, values).astype(np.float32)

    import hashlib

    stored = {record["id"]: record for record in EXPECTED["allfmt.ninfer"]["objects"]}
    found = {}
    for name in ("w.q4", "w.q5", "w.q6", "w.q8"):
        found[name] = ninfer.encode(stored[name]["format"], matrix(*stored[name]["shape"], len(name)))
    fp8 = matrix(3, 70, 4)
    fp8[1], fp8[0, 1] = 0, -0.0
    found["w.fp8"] = ninfer.encode("fp8_e4m3fn_row_bf16", fp8)
    single, stack = matrix(128, 64, 5), [matrix(128, 128, 1), matrix(128, 128, 9)]
    for values in (single, *stack):
        values[0, :16] = 0
    found["w.nvfp4"] = ninfer.encode("nvfp4", single)
    found["w.nvfp4x2"] = ninfer.encode("nvfp4", np.concatenate(stack), divisors=2)
    two_bit, ternary = [0x3800, 0xBC00, 1, 0x8000, 0x2E66], [0x3800, 0x3C00, 0x2E66, 1, 0x3555]
    for name, words in (("w.q2", two_bit), ("w.q2_k64", two_bit), ("w.t2", ternary)):
        (rows, columns), form = stored[name]["shape"], stored[name]["format"]
        span, low, group = (4, -1, 64) if form.startswith("q2") else (3, -1, 128)
        r, c = np.mgrid[:rows, :columns]
        groups = np.mgrid[:rows, : -(-columns // group)]
        scales = np.array(words, np.uint16)[(3 * groups[0] + groups[1]) % 5]
        found[name] = ninfer.pack_grouped(form, (5 * r + 7 * c + len(name)) % span + low, scales)
    for name, data in found.items():
        assert hashlib.sha256(data).hexdigest() == stored[name]["encoded_sha256"], name


def test_finish_waits_for_writes_that_have_begun(tmp_path, monkeypatch):
    """A file is never published with zeros where a thread was about to write."""
    path, values = tmp_path / "a", np.arange(1000, dtype=np.float32)
    writer = ninfer.Writer(path, [ninfer.TensorSpec("f", (1000,), "fp32")], TEXT, durable=False)
    begun, finished, put = threading.Event(), threading.Event(), writer._put

    def slow(offset, data):
        begun.set()
        assert not finished.wait(0.1)
        put(offset, data)

    monkeypatch.setattr(writer, "_put", slow)
    thread = threading.Thread(target=writer.write_values, args=("f", values))
    thread.start()
    begun.wait()
    writer.finish()
    finished.set()
    thread.join()
    with ninfer.open(path) as artifact:
        assert np.array_equal(artifact.read("f"), values)


def test_finish_refuses_when_a_write_it_waited_for_fails(tmp_path, monkeypatch):
    writer = ninfer.Writer(tmp_path / "a", [ninfer.TensorSpec("f", (2,), "fp32")], TEXT, durable=False)
    begun, go = threading.Event(), threading.Event()

    def fail(offset, data):
        begun.set()
        go.wait()
        raise OSError(28, "full")

    def write():
        with pytest.raises(OSError, match="full"):
            writer.write("f", bytes(8))

    monkeypatch.setattr(writer, "_put", fail)
    thread = threading.Thread(target=write)
    thread.start()
    begun.wait()
    threading.Timer(0.05, go.set).start()
    with pytest.raises(ninfer.WriterError, match="failed"):
        writer.finish()
    thread.join()
    assert listing(tmp_path) == []


def test_finish_after_a_write_that_failed_leaves_nothing(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "full")

    writer = ninfer.Writer(tmp_path / "a", [ninfer.TensorSpec("f", (2,), "fp32")], TEXT, durable=False)
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="full"):
        writer.write("f", bytes(8))
    monkeypatch.undo()
    with pytest.raises(ninfer.WriterError, match="failed"):
        writer.finish()
    assert listing(tmp_path) == []
    with pytest.raises(ninfer.WriterError, match="aborted"):
        writer.finish()


def test_names_that_utf8_cannot_spell_are_escaped(tmp_path):
    """What nobody here interprets is kept; a name the format defines is none with a lone surrogate."""
    spec = [ninfer.TensorSpec("w\u00e9", (1,), "fp32")]
    with ninfer.Writer(tmp_path / "a", spec, TEXT, metadata={"x": "\ud800", "y": "\u00e9"}, durable=False) as writer:
        writer.write("w\u00e9", bytes(4))
    with ninfer.open(tmp_path / "a") as made:
        assert made.metadata == {"x": "\ud800", "y": "\u00e9"}
        assert list(made.objects) == ["w\u00e9"]


def test_places_may_be_numpy_integers(tmp_path):
    specs = [ninfer.TensorSpec("f", (6,), "fp32"), ninfer.TensorSpec("q", (3, 8), "q4_g64_fp16")]
    with ninfer.Writer(tmp_path / "a", specs, TEXT, durable=False) as writer:
        for row in np.arange(3):
            writer.write_rows("q", row, np.ones((1, 8), np.float32))
        writer.write_elements("f", np.int64(0), np.arange(3, dtype=np.float32))
        writer.write("f", bytes(12), np.uint32(12))
        with pytest.raises(ninfer.WriterError, match="expected an integer"):
            writer.write("f", b"", 0.0)


def test_a_value_that_cannot_be_encoded_is_named_with_its_object(tmp_path):
    with (
        pytest.raises(ninfer.ValueDomainError, match=r"^Object 'w\.q': "),
        ninfer.Writer(tmp_path / "a", [ninfer.TensorSpec("w.q", (1, 2), "q4_g64_fp16")], TEXT) as writer,
    ):
        writer.write_values("w.q", np.array([[1, np.nan]], np.float32))
    assert listing(tmp_path) == []


def test_a_name_too_long_for_a_continuation_is_refused_before_anything_is_written(tmp_path):
    specs = [ninfer.TensorSpec("f", (5000,), "fp32")]
    with pytest.raises(ninfer.WriterError, match="at most 255"):
        ninfer.Writer(tmp_path / ("n" * 250), specs, TEXT, max_file_bytes=8192)
    assert listing(tmp_path) == []


@pytest.mark.parametrize("value", [{"a": {1: 2}}, {"a": [{True: 2}]}, {"a": ({None: 1},)}])
def test_a_member_name_that_is_no_text_is_refused(value, tmp_path):
    """It would be written as text, and read as something else than was given."""
    for place in ("metadata", "provenance"):
        with pytest.raises(ninfer.SchemaError, match="is no text"):
            ninfer.Writer(tmp_path / "a", [ninfer.TensorSpec("f", (1,), "fp32")], TEXT, **{place: value})
    assert listing(tmp_path) == []


def test_a_proposal_that_is_none_is_refused():
    with pytest.raises(ninfer.SchemaError, match="proposal"):
        ninfer.Component({}, proposal={"domain": "full"})


def test_metadata_that_holds_itself_is_refused(tmp_path):
    value = {"a": []}
    value["a"].append(value)
    with pytest.raises(ninfer.SchemaError, match="cannot be written as JSON"):
        ninfer.Writer(tmp_path / "a", [ninfer.TensorSpec("f", (1,), "fp32")], TEXT, metadata=value)
