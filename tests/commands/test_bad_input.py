"""Bad input by table: one line that names the file or the parameter, exit code 2, and nothing done.

Each row is one kind. Nothing is left of an attempt: no output, no private folder, and the input as it was.
"""

import copy
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from converting import convert, leftovers, wrong
from damage import CUT, FLIPPED, REPLACED, STORED, storages
from edits import mapped, native_moe, optimizer_state
from synthetic import (
    COLUMN,
    ROW,
    Cut,
    ExpertLayer,
    Foreign,
    FragmentAddress,
    Param,
    World,
    exact,
    make,
    random_full,
    save,
)

from deepspeed_affine.cli import ds_affine
from deepspeed_affine.storage import files as storage_files

# The checkpoints that are damaged.


def dense(tp=1, rows=0):
    return [
        Param("up.weight", random_full((4 * tp + rows, 3), 901), COLUMN),
        Param("down.weight", random_full((3, 2 * tp), 902), ROW if tp > 1 else Cut()),
        Param("norm.weight", random_full((5,), 903)),
        Param("bias", random_full((3,), 904), group=1),
        Param("frozen", random_full((3,), 905), kind="frozen"),
        Param("mask", random_full((2,), 906), kind="buffer"),
    ]


def zero(stage, tp=1, dp=2, **world):
    return make(World(stage=stage, tp=tp, dp=dp, **world), dense(tp))


def pipeline():
    params = [Param(f"{n}.w", random_full((4, 2), 10 + n), COLUMN, stages=(n,)) for n in range(2)]
    return make(World(tp=2, pp=2, layer_files=True), params)


def placed_experts():
    weights = {w: random_full((4, 2, 3), 40 + i) for i, w in enumerate(("w1", "w2", "w3"))}
    layer = ExpertLayer("mlp.experts", weights, ((3, 1), (2, 0, 1)), descriptor=True)
    made = make(World(dp=2), [Param("gate", random_full((3, 2), 1))], [layer])
    # Files of single experts stand beside, as DeepSpeed saves them; nothing is taken from them.
    for expert in range(4):
        values = {f"mlp.experts.{expert}.{w}": full[expert].clone() for w, full in weights.items()}
        made.files[f"layer_0_expert_{expert}_mp_rank_00_model_states.pt"] = values
    return made


def with_expert_optimizers():
    made, _ = native_moe()
    for rank in range(2):
        made.files[f"expp_rank_{rank}_mp_rank_00_optim_states.pt"] = {"optimizer": None, "seed": torch.arange(3)}
    return made


CHECKPOINTS = {
    "ZeRO-0": lambda: without_optimizer_files(zero(1, dp=1)),
    "ZeRO-1": lambda: zero(1),
    "ZeRO-2, tensor parallel": lambda: zero(2, tp=2),
    "ZeRO-3": lambda: zero(3),
    "ZeRO-3, tensor parallel": lambda: zero(3, tp=2, dp=1),
    "BF16_Optimizer": lambda: zero(1, prefix="bf16_", strip_padding=False),
    "pipeline": pipeline,
    "native experts": with_expert_optimizers,
    "stacked experts": placed_experts,
}


def without_optimizer_files(made):
    made.files = {name: root for name, root in made.files.items() if "optim" not in name}
    for root in made.files.values():
        root["optimizer"] = {"state": {}, "param_groups": [{"lr": 0.1}]}
        root["ds_config"] = {"zero_optimization": {"stage": 0}}
    return made


FILES = {
    "model states without ZeRO": ("ZeRO-0", "mp_rank_00_model_states.pt"),
    "model states": ("ZeRO-1", "mp_rank_00_model_states.pt"),
    "model states of the last rank": ("ZeRO-2, tensor parallel", "mp_rank_01_model_states.pt"),
    "optimizer states of the first rank": ("ZeRO-1", "zero_pp_rank_0_mp_rank_00_optim_states.pt"),
    "optimizer states of the last rank": ("ZeRO-2, tensor parallel", "zero_pp_rank_1_mp_rank_01_optim_states.pt"),
    "bf16 optimizer states": ("BF16_Optimizer", "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"),
    "ZeRO-3 model states": ("ZeRO-3", "zero_pp_rank_0_mp_rank_00_model_states.pt"),
    "ZeRO-3 model states of the last rank": ("ZeRO-3", "zero_pp_rank_1_mp_rank_00_model_states.pt"),
    "ZeRO-3 optimizer states": ("ZeRO-3", "zero_pp_rank_0_mp_rank_00_optim_states.pt"),
    "ZeRO-3 optimizer states of the last rank": ("ZeRO-3", "zero_pp_rank_1_mp_rank_00_optim_states.pt"),
    "ZeRO-3 optimizer states, tensor parallel": (
        "ZeRO-3, tensor parallel",
        "zero_pp_rank_0_mp_rank_01_optim_states.pt",
    ),
    "a layer file": ("pipeline", "layer_10-model_01-model_states.pt"),
    "an expert file": ("native experts", "layer_0_expert_3_mp_rank_00_model_states.pt"),
    "an expert optimizer file": ("native experts", "expp_rank_1_mp_rank_00_optim_states.pt"),
    "a file of one stacked expert": ("stacked experts", "layer_0_expert_2_mp_rank_00_model_states.pt"),
    "model states with experts": ("stacked experts", "mp_rank_00_model_states.pt"),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Every checkpoint saved once, found to convert, and copied by whoever damages it."""
    base = tmp_path_factory.mktemp("intact")
    found = {}
    for number, (name, build) in enumerate(CHECKPOINTS.items()):
        folder = Path(build().save(base / str(number)))
        assert convert(folder, base / f"out{number}") == 0, name
        found[name] = folder
    return found


def snapshot(folder):
    """Everything that can be seen of a folder without changing it."""
    found = {}
    for root, names, files in os.walk(folder):
        for name in [*names, *files]:
            path = Path(root) / name
            status = path.lstat()
            data = path.read_bytes() if path.is_file() and not path.is_symlink() else None
            found[str(path)] = (status.st_mode, status.st_size, status.st_mtime_ns, data)
    return found


def check_refused(folder, base, capsys, *subjects, options=()):
    """The whole promise about bad input; returns what was said."""
    target = base / "out"
    before, names = snapshot(folder), sorted(os.listdir(base))
    capsys.readouterr()
    assert convert(folder, target, *options) == 2
    said = capsys.readouterr()
    lines = said.err.strip().splitlines()
    assert lines
    assert all(line.startswith("ds_to_universal: error: ") for line in lines)
    assert "internal error" not in said.err
    assert "Traceback" not in said.err + said.out
    for subject in subjects:
        assert subject in said.err
    assert any(subject in lines[0] for subject in subjects)
    assert leftovers(target) == []
    assert sorted(os.listdir(base)) == names
    assert snapshot(folder) == before
    return said.err


# One file: cut, replaced, flipped.

ONE_FILE = {
    **{("cut", name): damage for name, damage in CUT.items()},
    **{("replaced by", name): damage for name, damage in REPLACED.items()},
    **{("flipped", name): damage for name, damage in FLIPPED.items()},
}


@pytest.mark.parametrize("damage", ONE_FILE, ids=" ".join)
@pytest.mark.parametrize("kind", FILES)
def test_one_damaged_file(tmp_path, capsys, folders, kind, damage):
    checkpoint, name = FILES[kind]
    folder = tmp_path / "ckpt"
    shutil.copytree(folders[checkpoint], folder)
    ONE_FILE[damage](folder / name)
    said = check_refused(folder, tmp_path, capsys, name)
    assert len(said.strip().splitlines()) == 1


@pytest.mark.parametrize("where", STORED)
@pytest.mark.parametrize("kind", FILES)
def test_one_flipped_byte_of_any_tensor(tmp_path, capsys, folders, kind, where):
    checkpoint, name = FILES[kind]
    folder = tmp_path / "ckpt"
    shutil.copytree(folders[checkpoint], folder)
    intact = (folder / name).read_bytes()
    records = storages(folder / name)
    assert records
    for record in records:
        STORED[where](record)(folder / name)
        said = check_refused(folder, tmp_path, capsys, name)
        # A number is compared with the other ranks' while metadata is read; the rest is found by its checksum.
        assert "damaged" in said or "'step'" in said
        assert "--on-drift" not in said or "'step'" in said
        (folder / name).write_bytes(intact)
    assert convert(folder, tmp_path / "out") == 0


@pytest.mark.parametrize("kind", FILES)
def test_a_file_that_may_not_be_read(tmp_path, capsys, folders, kind, monkeypatch):
    checkpoint, name = FILES[kind]
    folder = tmp_path / "ckpt"
    shutil.copytree(folders[checkpoint], folder)
    real = os.open

    def refusing(path, *args, **kwargs):
        if os.path.basename(path) == name:
            raise PermissionError(13, "Permission denied", path)
        return real(path, *args, **kwargs)

    # Simulated, because root may read anything.
    monkeypatch.setattr(storage_files.os, "open", refusing)
    assert "Permission denied" in check_refused(folder, tmp_path, capsys, name)


@pytest.mark.parametrize("kind", FILES)
def test_a_file_that_is_gone(tmp_path, capsys, folders, kind):
    checkpoint, name = FILES[kind]
    folder = tmp_path / "ckpt"
    shutil.copytree(folders[checkpoint], folder)
    os.remove(folder / name)
    if kind == "an expert optimizer file":
        # Nothing says how many there were, and nothing is taken from them.
        assert convert(folder, tmp_path / "out") == 0
        return
    # Of the last expert nothing says that there was one more; a rank's share of them no longer comes out even.
    named = {"model states without ZeRO": str(folder), "an expert file": "deepspeed_experts"}
    check_refused(folder, tmp_path, capsys, named.get(kind, name))


# Files that contradict each other, or themselves.


def every_info(made, **entries):
    for root in made.files.values():
        if isinstance(root, dict) and "universal_checkpoint_info" in root:
            root["universal_checkpoint_info"].update(copy.deepcopy(entries))


def one_info(made, mp, **entries):
    made.model(mp)["universal_checkpoint_info"] = {**made.model(mp)["universal_checkpoint_info"], **entries}


def shapes(made, mp=0, dp=0):
    return made.model(mp, dp)["param_shapes"]


def every_shape(made, name, shape):
    for root in made.files.values():
        for group in root.get("param_shapes") or () if isinstance(root, dict) else ():
            if name in group:
                group[name] = torch.Size(shape)


def without_shape(made, name):
    for root in made.files.values():
        for group in root.get("param_shapes") or () if isinstance(root, dict) else ():
            group.pop(name, None)


def renamed_shape(made, name, new):
    for root in made.files.values():
        for group in root.get("param_shapes") or () if isinstance(root, dict) else ():
            if name in group:
                group[new] = group.pop(name)


def slices(made, dp=0, mp=0, group=0):
    return made.optim(dp, mp)["param_slice_mappings"][group]


def sliced(made, name, dp=0, mp=0, **changes):
    found = slices(made, dp, mp)
    found[name] = FragmentAddress(**{**vars(found[name]), **changes})


def masters(made, dp=0, mp=0):
    key = "fp32_flat_groups" if made.world.stage == 3 else "single_partition_of_fp32_groups"
    return made.optim(dp, mp)[key]


def master(made, dp, mp, change, group=0):
    masters(made, dp, mp)[group] = change(masters(made, dp, mp)[group])


def state(made, dp, mp, name, change, group=0):
    values = optimizer_state(made, dp, mp)["state"][group]
    values[name] = change(values[name])


def of_another_run(made, other, name):
    made.files[name] = other.files[name]


def halves(full, tp):
    return list(torch.chunk(full, tp))


def with_map(change):
    made = mapped("qkv", random_full((6, 4), 1), halves, 2)
    for mp in range(2):
        info = made.model(mp)["universal_checkpoint_info"] = copy.deepcopy(made.model(mp)["universal_checkpoint_info"])
        document = info["affine_map"]
        change(document["params"][exact("qkv")], document)
    return made


def piece(entry, rank, **changes):
    entry["ranks"][rank]["pieces"][0] = {**entry["ranks"][rank]["pieces"][0], **changes}


SUB = {"patterns": [exact("up.weight")], "shape": ((4, 4), 3), "partition_dim": 0}
O0, O1 = "zero_pp_rank_0_mp_rank_00_optim_states.pt", "zero_pp_rank_1_mp_rank_00_optim_states.pt"
O01 = "zero_pp_rank_0_mp_rank_01_optim_states.pt"
M0, M1 = "mp_rank_00_model_states.pt", "mp_rank_01_model_states.pt"
Z0, Z1 = "zero_pp_rank_0_mp_rank_00_model_states.pt", "zero_pp_rank_1_mp_rank_00_model_states.pt"

ONE, TP, Z3, Z3TP = (CHECKPOINTS[name] for name in list(CHECKPOINTS)[1:5])

CONTRADICTIONS = {
    # Shapes.
    "a shape is larger": (ONE, lambda m: every_shape(m, "up.weight", (5, 3)), ["'up.weight'"]),
    "a shape is smaller": (ONE, lambda m: every_shape(m, "up.weight", (3, 3)), ["'up.weight'"]),
    "a shape is absurd": (ONE, lambda m: every_shape(m, "up.weight", (1 << 40, 1 << 20)), ["up.weight"]),
    "a shape is negative": (ONE, lambda m: shapes(m)[0].update({"up.weight": (-4, 3)}), [M0, "'up.weight'"]),
    "a shape is no shape": (ONE, lambda m: shapes(m)[0].update({"up.weight": "4x3"}), [M0, "'up.weight'"]),
    "a shape is missing": (ONE, lambda m: without_shape(m, "up.weight"), ["'up.weight'"]),
    "a shape is of another name": (ONE, lambda m: renamed_shape(m, "up.weight", "up.wieght"), ["'up.weight'"]),
    "a shape too many": (ONE, lambda m: shapes(m)[0].update({"more": torch.Size([2])}), ["'more'"]),
    "no shapes at all, ZeRO-3": (Z3, lambda m: [m.model(0, d).pop("param_shapes") for d in range(2)], [Z0]),
    "shapes of fewer groups, ZeRO-3": (Z3, lambda m: [shapes(m, 0, d).pop() for d in range(2)], [O0]),
    "shapes of more groups, ZeRO-3": (Z3, lambda m: [shapes(m, 0, d).append({}) for d in range(2)], [O0]),
    "a shape of one data rank differs, ZeRO-3": (
        Z3,
        lambda m: m.model(0, 1).update(param_shapes=[{**shapes(m)[0], "up.weight": torch.Size([9, 3])}, shapes(m)[1]]),
        [O1],
    ),
    "parameters of one data rank in another order, ZeRO-3": (
        Z3,
        lambda m: m.model(0, 1).update(param_shapes=[dict(reversed(shapes(m)[0].items())), shapes(m)[1]]),
        [Z1],
    ),
    "tensor-parallel shapes differ where they must agree": (
        TP,
        lambda m: shapes(m, 1)[0].update({"up.weight": torch.Size([4, 4])}),
        ["up.weight"],
    ),
    "replicas of different shape": (TP, lambda m: shapes(m, 1)[0].update({"norm.weight": torch.Size([6])}), ["norm.w"]),
    "a tensor-parallel rank records no shape": (TP, lambda m: shapes(m, 1)[0].pop("up.weight"), ["up.weight"]),
    "pipeline stages record different shapes": (
        lambda: make(World(pp=2, layer_files=True), [Param("w", random_full((4,), 1), stages=(0, 1))]),
        lambda m: shapes(m, 1)[0].update({"w": torch.Size([2, 3])}),
        ["'w'"],
    ),
    # Types of numbers.
    "weights of one rank in another precision": (ONE, lambda m: master(m, 1, 0, torch.Tensor.bfloat16), ["bfloat16"]),
    "moments of one rank in another precision": (
        ONE,
        lambda m: state(m, 1, 0, "exp_avg", torch.Tensor.double),
        ["float64", "'exp_avg'"],
    ),
    "weights of one rank in another precision, ZeRO-3": (
        Z3,
        lambda m: master(m, 1, 0, torch.Tensor.half),
        ["float16"],
    ),
    "moments of one tensor-parallel rank in another precision": (
        TP,
        lambda m: [state(m, d, 1, "exp_avg_sq", torch.Tensor.bfloat16) for d in range(2)],
        ["bfloat16", "'exp_avg_sq'"],
    ),
    "a frozen weight of one rank in another precision": (
        TP,
        lambda m: m.model(1)["module"].update(frozen=m.model(1)["module"]["frozen"].double()),
        ["'frozen'", "float64"],
    ),
    # States.
    "a state lost on one rank": (ONE, lambda m: optimizer_state(m, 1)["state"][0].pop("exp_avg"), ["'exp_avg'"]),
    "a state lost on one rank, ZeRO-3": (Z3, lambda m: optimizer_state(m, 1)["state"][0].pop("exp_avg"), ["exp_avg"]),
    "a state lost on one tensor-parallel rank": (
        TP,
        lambda m: [optimizer_state(m, d, 1)["state"][0].pop("exp_avg") for d in range(2)],
        ["'exp_avg'"],
    ),
    "a state more on one rank": (
        ONE,
        lambda m: optimizer_state(m, 1)["state"][0].update(extra=masters(m, 1)[0].clone()),
        ["'extra'"],
    ),
    "a state too short": (ONE, lambda m: state(m, 1, 0, "exp_avg", lambda t: t[:-3].clone()), ["'exp_avg'"]),
    "weights too short": (ONE, lambda m: master(m, 1, 0, lambda t: t[:-3].clone()), ["'norm.weight'"]),
    "weights too short, ZeRO-3": (Z3, lambda m: master(m, 1, 0, lambda t: t[:-1].clone()), [O1]),
    "weights too long, ZeRO-3": (Z3, lambda m: master(m, 1, 0, lambda t: torch.cat([t, t])), [O1]),
    "weights in two dimensions": (ONE, lambda m: master(m, 1, 0, lambda t: t.reshape(1, -1)), [O1]),
    "weights are no tensor": (ONE, lambda m: master(m, 1, 0, lambda t: [1.0]), [O1]),
    "a state in two dimensions": (ONE, lambda m: state(m, 1, 0, "exp_avg", lambda t: t.reshape(1, -1)), ["'exp_avg'"]),
    "a state is no tensor": (ONE, lambda m: state(m, 1, 0, "exp_avg", lambda t: "text"), ["'exp_avg'"]),
    "a state is sparse": (ONE, lambda m: state(m, 1, 0, "exp_avg", torch.Tensor.to_sparse), ["'exp_avg'"]),
    "a state without values": (ONE, lambda m: state(m, 1, 0, "exp_avg", lambda t: t.to("meta")), ["meta device"]),
    "weights without values": (Z3, lambda m: master(m, 1, 0, lambda t: t.to("meta")), ["meta device"]),
    "a state called like the weights": (
        ONE,
        lambda m: optimizer_state(m)["state"][0].update(fp32=torch.zeros(3)),
        [O0, "'fp32'"],
    ),
    "steps of different ranks": (ONE, lambda m: state(m, 1, 0, "step", lambda t: t + 1), ["'step'", O1]),
    "fewer weights than groups": (ONE, lambda m: masters(m, 1).pop(), [O1]),
    "no weights": (ONE, lambda m: m.optim(1).pop("single_partition_of_fp32_groups"), [O1]),
    "no optimizer": (ONE, lambda m: m.files[O1].pop("optimizer_state_dict"), [O1]),
    "no state": (ONE, lambda m: m.optim(1)["base_optimizer_state"].pop("state"), [O1]),
    "no state, ZeRO-3": (Z3, lambda m: m.optim(1)["optimizer_state_dict"].pop("state"), [O1]),
    "no hyperparameters": (ONE, lambda m: m.optim(0)["base_optimizer_state"].pop("param_groups"), [O0]),
    "no hyperparameters without ZeRO": (CHECKPOINTS["ZeRO-0"], lambda m: m.model().update(optimizer=None), [M0]),
    "a stage that does not exist": (ONE, lambda m: m.optim(0).update(zero_stage=7), [O0]),
    "a state per parameter": (ONE, lambda m: m.optim(0).update(base_optimizer_state=[{}]), [O0, "elastic"]),
    # Slice tables.
    "no slices": (ONE, lambda m: m.optim(1).pop("param_slice_mappings"), [O1]),
    "slices of fewer groups": (ONE, lambda m: m.optim(1)["param_slice_mappings"].pop(), [O1]),
    "a slice is missing": (ONE, lambda m: slices(m, 1).pop("norm.weight"), ["'norm.weight'"]),
    "all slices of a parameter are missing": (
        ONE,
        lambda m: [slices(m, d).pop("norm.weight", None) for d in range(2)],
        ["'norm.weight'"],
    ),
    "a slice is too long": (ONE, lambda m: sliced(m, "up.weight", numel=900), ["'up.weight'"]),
    "a slice begins before its partition": (ONE, lambda m: sliced(m, "up.weight", start=-1), [O0, "'up.weight'"]),
    "a slice has no length": (ONE, lambda m: sliced(m, "up.weight", numel=None), [O0, "'up.weight'"]),
    "a slice has a negative length": (ONE, lambda m: sliced(m, "up.weight", numel=-4), [O0, "'up.weight'"]),
    "slices overlap": (ONE, lambda m: sliced(m, "norm.weight", dp=1, start=0), ["overlap", O1]),
    "a slice does not go on where it stopped": (
        lambda: make(World(dp=2), [Param("w", random_full((5,), 1)), Param("v", random_full((6,), 2))]),
        lambda m: (sliced(m, "v", 0, start=0, numel=1), sliced(m, "w", 0, start=1, numel=5)),
        ["'v'", "exchanged"],
    ),
    "a slice of an unknown parameter": (
        ONE,
        lambda m: slices(m, 1).update(stranger=slices(m, 1).pop("norm.weight")),
        ["'stranger'"],
    ),
    "a slice in another group": (
        ONE,
        lambda m: m.optim(1)["param_slice_mappings"].reverse(),
        ["parameter group"],
    ),
    "paddings are no numbers": (ONE, lambda m: m.optim(1).update(group_paddings=["x", "y"]), [O1]),
    "a partition rank that cannot be, ZeRO-3": (
        Z3,
        lambda m: m.optim(1).update(ds_zero_partition_groups=[{"partition_count": 2, "partition_rank": 5}]),
        [O1, "'partition_rank' of a sub-group is 5"],
    ),
    # Modules.
    "a frozen replica drifted": (TP, lambda m: m.model(1)["module"]["frozen"].add_(1), ["'frozen'"]),
    "a frozen weight is missing on one rank": (TP, lambda m: m.model(1)["module"].pop("frozen"), ["frozen"]),
    "the module is no dictionary": (ONE, lambda m: m.model().update(module=[1]), [M0]),
    "the module has numbers for names": (ONE, lambda m: m.model()["module"].update({3: torch.zeros(2)}), [M0]),
    "a frozen partition without its shape": (
        Z3TP,
        lambda m: [m.model(t)["frozen_param_shapes"].pop("frozen") for t in range(2)],
        ["'frozen'"],
    ),
    "a weight that nobody stores": (
        ONE,
        lambda m: (m.model()["module"].pop("bias"), [slices(m, d, 0, 1).clear() for d in range(2)]),
        ["'bias'"],
    ),
    # Degrees.
    "degrees that do not multiply": (
        TP,
        lambda m: [
            m.model(t).update(checkpoint_parallel_dimensions={"pp_degree": 2, "tp_degree": 2}) for t in range(2)
        ],
        ["pipeline stages"],
    ),
    "degrees that differ between files": (
        TP,
        lambda m: m.model(1).update(checkpoint_parallel_dimensions={"pp_degree": 2, "tp_degree": 1}),
        ["different degrees"],
    ),
    "degrees that are no numbers": (
        TP,
        lambda m: m.model(0).update(checkpoint_parallel_dimensions={"pp_degree": "1", "tp_degree": None}),
        [M0],
    ),
    "fewer data ranks stated than there are files": (ONE, lambda m: m.model().update(dp_world_size=1), [O1]),
    "more data ranks stated than there are files": (
        ONE,
        lambda m: m.model().update(dp_world_size=3),
        ["zero_pp_rank_2_mp_rank_00_optim_states.pt"],
    ),
    "more model ranks stated than there are files": (ONE, lambda m: m.model().update(mp_world_size=2), ["_mp_rank_01"]),
    "an absurd number of ranks stated": (ONE, lambda m: m.model().update(dp_world_size=1 << 50), ["rank_2_"]),
    # Patterns.
    "no info": (TP, lambda m: [m.model(t).pop("universal_checkpoint_info") for t in range(2)], [M0]),
    "info of one rank only": (TP, lambda m: m.model(1).pop("universal_checkpoint_info"), [M1]),
    "info that is no dictionary": (TP, lambda m: m.model(0).update(universal_checkpoint_info=[1]), [M0]),
    "ranks with different info": (TP, lambda m: one_info(m, 1, tp_replicated_parameter_patterns=[]), [M1]),
    "ranks with different vocabularies": (TP, lambda m: one_info(m, 1, original_vocab_size=3), [M1]),
    "a pattern that matches nothing": (
        TP,
        lambda m: every_info(m, vocabulary_parameter_patterns=["embed"], original_vocab_size=3),
        ["'embed'"],
    ),
    "two patterns for one name": (
        TP,
        lambda m: every_info(m, vocabulary_parameter_patterns=["up", "up.w"]),
        ["up.weight"],
    ),
    "a pattern that is no expression": (TP, lambda m: every_info(m, vocabulary_parameter_patterns=["*x"]), ["'*x'"]),
    "a pattern that is no text": (TP, lambda m: every_info(m, vocabulary_parameter_patterns=[3]), ["vocabulary"]),
    "patterns that are no list": (TP, lambda m: every_info(m, tp_replicated_parameter_patterns="norm"), ["tp_repl"]),
    "one name in two lists": (
        TP,
        lambda m: every_info(m, parameter_with_row_parallelism_patterns=[exact("down.weight"), exact("norm.weight")]),
        ["'norm.weight'"],
    ),
    "a vocabulary of unknown size": (
        TP,
        lambda m: every_info(m, vocabulary_parameter_patterns=[exact("up.weight")]),
        ["up.weight", "original_vocab_size"],
    ),
    "a vocabulary of negative size": (TP, lambda m: every_info(m, original_vocab_size=-1), ["original_vocab_size"]),
    "a padded vocabulary of another size": (
        TP,
        lambda m: every_info(
            m, vocabulary_parameter_patterns=[exact("up.weight")], original_vocab_size=7, padded_vocab_size=99
        ),
        ["up.weight", "99"],
    ),
    "split parameters said to be whole": (
        TP,
        lambda m: every_info(
            m, tp_replicated_parameter_patterns=[exact("norm.weight"), exact("up.weight"), exact("bias")]
        ),
        ["'up.weight'"],
    ),
    "whole parameters said to be split": (
        TP,
        lambda m: every_info(m, tp_replicated_parameter_patterns=[exact("norm.weight")]),
        ["'bias'"],
    ),
    "rows said to be columns": (
        TP,
        lambda m: every_info(m, parameter_with_row_parallelism_patterns=[exact("norm.weight")]),
        ["norm.weight"],
    ),
    "sub-parameters of another width": (
        TP,
        lambda m: every_info(
            m,
            parameter_with_sub_params=[{**SUB, "shape": ((4, 2), 3)}],
            sub_param_shard_widths={exact("up.weight"): [[2, 2], [1, 1]]},
        ),
        ["up.weight"],
    ),
    "sub-parameters without widths": (
        TP,
        lambda m: every_info(m, parameter_with_sub_params=[SUB]),
        ["up.weight", "sub_param_shard_widths"],
    ),
    "sub-parameters with widths of more ranks": (
        TP,
        lambda m: every_info(
            m, parameter_with_sub_params=[SUB], sub_param_shard_widths={exact("up.weight"): [[2, 1, 1], [2, 1, 1]]}
        ),
        ["up.weight"],
    ),
    "sub-parameters along an axis that is not there": (
        TP,
        lambda m: every_info(m, parameter_with_sub_params=[{**SUB, "partition_dim": 4}]),
        ["up"],
    ),
    "a parameter the writer could not describe": (
        TP,
        lambda m: every_info(m, autotp_unsupported_parameter_patterns={exact("up.weight"): "interleaved"}),
        ["up.weight", "interleaved"],
    ),
    "a version that is no number": (TP, lambda m: every_info(m, universal_checkpoint_version="new"), ["version"]),
    # Affine maps.
    "a map of a newer version": (lambda: with_map(lambda e, d: d.update(version=99)), None, ["99"]),
    "a map without a version": (lambda: with_map(lambda e, d: d.pop("version")), None, ["version"]),
    "a map in two spellings": (lambda: with_map(lambda e, d: d.update({exact("qkv"): e})), None, ["qkv"]),
    "a map of another F": (lambda: with_map(lambda e, d: e.update(logical_shape=[7, 4])), None, ["qkv"]),
    "a map of a smaller F": (lambda: with_map(lambda e, d: e.update(logical_shape=[5, 4])), None, ["qkv"]),
    "a map that leaves a hole": (
        lambda: with_map(lambda e, d: piece(e, 0, shape=[11])),
        None,
        ["qkv"],
    ),
    "a map that reads a row twice": (lambda: with_map(lambda e, d: piece(e, 1, source=[8, [1]])), None, ["qkv"]),
    "a map that writes an address twice": (
        lambda: with_map(lambda e, d: e["ranks"][0]["pieces"].append(e["ranks"][0]["pieces"][0])),
        None,
        ["qkv"],
    ),
    "a map that leaves its shard": (lambda: with_map(lambda e, d: piece(e, 0, dest=[4, [1]])), None, ["qkv"]),
    "a map with a wrong holder": (lambda: with_map(lambda e, d: piece(e, 0, locations=[0, 1])), None, ["qkv"]),
    "a map with a scale of zero": (lambda: with_map(lambda e, d: piece(e, 0, scale=0.0)), None, ["qkv"]),
    "a map with an infinite scale": (lambda: with_map(lambda e, d: piece(e, 0, scale=float("inf"))), None, ["qkv"]),
    "a map of one rank": (lambda: with_map(lambda e, d: e["ranks"].pop(1)), None, ["qkv"]),
    "a map of three ranks": (lambda: with_map(lambda e, d: e["ranks"].update({2: e["ranks"][1]})), None, ["qkv"]),
    "a map with one rank in two spellings": (
        lambda: with_map(lambda e, d: e["ranks"].update({"0": e["ranks"][0]})),
        None,
        ["qkv"],
    ),
    "a map of another shard": (
        lambda: with_map(lambda e, d: e["ranks"][0].update(shard_shape=[2, 4])),
        None,
        ["qkv"],
    ),
    "a map that is no map": (lambda: with_map(lambda e, d: d["params"].update({exact("qkv"): 3})), None, ["qkv"]),
    "two maps for one name": (
        lambda: with_map(lambda e, d: d.update(params={"qk": e, "q": {**e, "logical_shape": [4, 6]}})),
        None,
        ["qkv"],
    ),
    # Experts.
    "experts on more ranks than there are": (
        CHECKPOINTS["stacked experts"],
        lambda m: m.model()["ds_autoep_layers"][0].update(ep_size=3),
        ["mlp.experts"],
    ),
    "an expert that no rank holds": (
        CHECKPOINTS["stacked experts"],
        lambda m: m.model()["ds_autoep_layers"][0]["expert_placement"]["ranks"][1].update(experts=[2, 1]),
        ["mlp.experts"],
    ),
    "an expert placed twice on one rank": (
        CHECKPOINTS["stacked experts"],
        lambda m: m.model()["ds_autoep_layers"][0]["expert_placement"]["ranks"][0].update(experts=[3, 3]),
        ["mlp.experts"],
    ),
    "a placement of a newer version": (
        CHECKPOINTS["stacked experts"],
        lambda m: m.model()["ds_autoep_layers"][0]["expert_placement"].update(version=2),
        ["mlp.experts"],
    ),
    "experts recorded twice": (
        CHECKPOINTS["stacked experts"],
        lambda m: m.model()["ds_autoep_layers"].append(m.model()["ds_autoep_layers"][0]),
        ["mlp.experts"],
    ),
    "native experts that do not divide": (
        CHECKPOINTS["native experts"],
        lambda m: m.files.pop("layer_0_expert_3_mp_rank_00_model_states.pt"),
        ["deepspeed_experts"],
    ),
    "an expert file of another layer's name": (
        CHECKPOINTS["native experts"],
        lambda m: m.files["layer_0_expert_2_mp_rank_00_model_states.pt"].update({"mlp.experts.w1.2": torch.zeros(2)}),
        ["layer_0_expert_2_mp_rank_00_model_states.pt", "'mlp.experts.w1.2'"],
    ),
    "an expert file with another expert's weights": (
        CHECKPOINTS["native experts"],
        lambda m: m.files.update(
            {
                "layer_0_expert_2_mp_rank_00_model_states.pt": m.files["layer_0_expert_1_mp_rank_00_model_states.pt"],
            }
        ),
        ["layer_0_expert_2_mp_rank_00_model_states.pt"],
    ),
    "a partition that repeats one element": (
        ONE,
        lambda m: master(m, 0, 0, lambda t: t[:1].expand(t.shape)),
        ["'up.weight'"],
    ),
    # Files of something else.
    "a file of another step": (ONE, lambda m: of_another_run(m, zero(1, step=torch.tensor(9.0)), O1), ["'step'", O1]),
    "a file of more ranks": (ONE, lambda m: of_another_run(m, zero(1, dp=4), O1), ["weight"]),
    "a file of a larger model": (
        ONE,
        lambda m: of_another_run(m, make(World(dp=2), dense(rows=1)), O1),
        ["weight"],
    ),
    "a file of another optimizer": (
        ONE,
        lambda m: of_another_run(m, zero(1, states=("momentum_buffer",)), O1),
        ["exp_avg"],
    ),
    "a file of another stage": (ONE, lambda m: of_another_run(m, zero(3), O1), [O1]),
    "a file of another stage, ZeRO-3": (Z3, lambda m: of_another_run(m, zero(1), O1), [O1]),
    "a file of another stage first": (ONE, lambda m: of_another_run(m, zero(3), O0), ["ZeRO"]),
    "a file of another stage first, ZeRO-3": (Z3, lambda m: of_another_run(m, zero(1), O0), ["ZeRO"]),
    "a file of tensor parallelism": (ONE, lambda m: of_another_run(m, zero(1, tp=2), M0), ["_mp_rank_01_"]),
    "model states of both kinds": (ONE, lambda m: of_another_run(m, zero(3), Z0), [M0, Z0]),
    "optimizer files under two prefixes": (
        ONE,
        lambda m: of_another_run(m, zero(1, prefix="bf16_"), "bf16_" + O1),
        [O0, "bf16_"],
    ),
    "a file of other names": (
        ONE,
        lambda m: of_another_run(m, make(World(dp=2), [replace(p, name=f"x.{p.name}") for p in dense()]), O1),
        ["'bias'", "'x.norm.weight'"],
    ),
    "a dictionary of something else": (ONE, lambda m: m.files.update({O1: {"a": 1}}), [O1]),
    "a dictionary of something else first": (ONE, lambda m: m.files.update({O0: {"a": 1}}), [O0]),
    "a dictionary of something else, ZeRO-3": (Z3, lambda m: m.files.update({Z0: {"a": 1}}), [Z0]),
    "a dictionary of something else, ZeRO-3 optimizer": (Z3, lambda m: m.files.update({O1: {"a": 1}}), [O1]),
    "a plain state dictionary": (ONE, lambda m: m.files.update({M0: {"up.weight": torch.zeros(4, 3)}}), [M0]),
    "the other kind of file": (ONE, lambda m: m.files.update({O1: m.model()}), [O1]),
}


@pytest.mark.parametrize("kind", CONTRADICTIONS)
def test_files_that_contradict_each_other(tmp_path, capsys, kind):
    build, edit, subjects = CONTRADICTIONS[kind]
    made = build()
    if edit is not None:
        edit(made)
    folder = Path(made.save(tmp_path / "ckpt"))
    check_refused(folder, tmp_path, capsys, *subjects)


# Folders: files missing, doubled, exchanged, left over, mixed in.


def copy_file(folder, name, new):
    shutil.copy(folder / name, folder / new)


def exchange(folder, one, other):
    (folder / one).rename(folder / "aside")
    (folder / other).rename(folder / one)
    (folder / "aside").rename(folder / other)


def rank_of(name, rank):
    return name.replace("rank_1_", f"rank_{rank}_")


def mixed_in(folder, other, *names):
    source = Path(other.save(folder.parent / "other"))
    for name in names or os.listdir(source):
        shutil.copy(source / name, folder / name)
    shutil.rmtree(source)


def only(folder, *names):
    for name in set(os.listdir(folder)) - set(names):
        os.remove(folder / name)


FOLDERS = {
    "a rank missing": ("ZeRO-1", lambda f: os.remove(f / O1), [O1]),
    "the first rank missing": ("ZeRO-1", lambda f: os.remove(f / O0), [O0]),
    "a tensor-parallel rank missing": ("ZeRO-2, tensor parallel", lambda f: os.remove(f / M1), [M1]),
    "all files of a tensor-parallel rank missing": (
        "ZeRO-2, tensor parallel",
        lambda f: [os.remove(f / n) for n in os.listdir(f) if "mp_rank_01" in n],
        ["mp_rank_01"],
    ),
    "a rank missing, ZeRO-3": ("ZeRO-3", lambda f: os.remove(f / Z1), [Z1]),
    "all files of a rank missing, ZeRO-3": ("ZeRO-3", lambda f: [os.remove(f / n) for n in (Z1, O1)], [Z1, O1]),
    "optimizer files only": ("ZeRO-1", lambda f: only(f, O0, O1), ["mp_rank_00_model_states.pt"]),
    "model files only, ZeRO-3": ("ZeRO-3", lambda f: only(f, Z0, Z1), ["ckpt"]),
    "expert files only": (
        "native experts",
        lambda f: [os.remove(f / n) for n in (M0, O0, O1)],
        ["ckpt"],
    ),
    "a rank doubled": ("ZeRO-1", lambda f: copy_file(f, O0, O1), [O1, O0]),
    "the last rank doubled": ("ZeRO-1", lambda f: copy_file(f, O1, O0), [O0, O1]),
    "a rank doubled, ZeRO-3": ("ZeRO-3", lambda f: copy_file(f, O0, O1), [O1, O0]),
    "model states doubled, ZeRO-3": ("ZeRO-3", lambda f: copy_file(f, Z0, Z1), [Z1, Z0]),
    "a tensor-parallel rank doubled": ("ZeRO-2, tensor parallel", lambda f: copy_file(f, O0, O01), [O01, O0]),
    "a layer doubled": (
        "pipeline",
        lambda f: copy_file(f, "layer_00-model_00-model_states.pt", "layer_10-model_00-model_states.pt"),
        ["layer_10-model_00", "layer_00-model_00"],
    ),
    "an expert doubled": (
        "native experts",
        lambda f: copy_file(
            f, "layer_0_expert_0_mp_rank_00_model_states.pt", "layer_0_expert_1_mp_rank_00_model_states.pt"
        ),
        ["layer_0_expert_1", "layer_0_expert_0"],
    ),
    "two ranks exchanged": ("ZeRO-1", lambda f: exchange(f, O0, O1), [O0, O1]),
    "two ranks exchanged, ZeRO-3": ("ZeRO-3", lambda f: exchange(f, O0, O1), [O0, O1]),
    "two model files exchanged": ("ZeRO-2, tensor parallel", lambda f: exchange(f, M0, M1), [M0, M1]),
    "two model files exchanged, ZeRO-3": ("ZeRO-3", lambda f: exchange(f, Z0, Z1), [Z0, Z1]),
    "a rank left over of a larger run": ("ZeRO-1", lambda f: copy_file(f, O1, rank_of(O1, 2)), [rank_of(O1, 2)]),
    "a far rank left over": ("ZeRO-3", lambda f: copy_file(f, O1, rank_of(O1, 900)), [rank_of(O1, 900)]),
    "a model file left over": ("ZeRO-1", lambda f: copy_file(f, M0, M1), [M1]),
    "one rank under two spellings": (
        "ZeRO-1",
        lambda f: copy_file(f, M0, "mp_rank_0_model_states.pt"),
        ["mp_rank_0_model_states.pt", M0],
    ),
    "one rank under an early and a late name": (
        "ZeRO-1",
        lambda f: copy_file(f, O1, O1.replace("_optim", "optim")),
        [O1, O1.replace("_optim", "optim")],
    ),
    "one rank under two prefixes": ("ZeRO-1", lambda f: copy_file(f, O1, "bf16_" + O1), [O0, "bf16_" + O1]),
    "another stage mixed in": ("ZeRO-1", lambda f: mixed_in(f, zero(3), Z0, Z1), [M0, Z0]),
    "another stage mixed in over the first": ("ZeRO-3", lambda f: mixed_in(f, zero(1)), [M0, Z0]),
    "another topology mixed in": ("ZeRO-1", lambda f: mixed_in(f, zero(1, tp=2), M1, O01), [M1, O01]),
    "model files only": ("ZeRO-1", lambda f: only(f, M0), [M0]),
    "a model file saved without ZeRO": (
        "ZeRO-1",
        lambda f: mixed_in(f, without_optimizer_files(zero(1)), M0),
        [M0],
    ),
    "a model file of the other stage": ("ZeRO-1", lambda f: mixed_in(f, zero(2), M0), [M0]),
    "a larger run mixed in over it": ("ZeRO-1", lambda f: mixed_in(f, zero(1, dp=3), O0, O1), ["'bias'"]),
    "another run's model file": ("ZeRO-1", lambda f: mixed_in(f, zero(1, tp=2), M0), ["_mp_rank_01_"]),
    "experts of another layer only": (
        "native experts",
        lambda f: copy_file(
            f, "layer_0_expert_0_mp_rank_00_model_states.pt", "layer_1_expert_1_mp_rank_00_model_states.pt"
        ),
        ["layer_1_expert_0_mp_rank_00_model_states.pt"],
    ),
}


@pytest.mark.parametrize("kind", FOLDERS)
def test_folders_that_are_not_one_whole_checkpoint(tmp_path, capsys, folders, kind):
    checkpoint, edit, subjects = FOLDERS[kind]
    folder = tmp_path / "ckpt"
    shutil.copytree(folders[checkpoint], folder)
    edit(folder)
    check_refused(folder, tmp_path, capsys, *subjects)


# What is no checkpoint folder at all.


def universal_folder(base):
    assert convert(zero(1).save(base / "ckpt"), base / "made") == 0
    shutil.rmtree(base / "ckpt")
    (base / "latest_universal").unlink()
    return base / "made"


def folder_of_checkpoints(base):
    zero(1).save(base / "run" / "global_step7")
    (base / "run" / "latest").write_text("global_step7")
    return base / "run"


def kept(made, path):
    return path


INPUTS = {
    "nothing": lambda base: base / "absent",
    "a file": lambda base: kept((base / "file").write_text("x"), base / "file"),
    "an empty folder": lambda base: kept((base / "empty").mkdir(), base / "empty"),
    "a folder of other files": lambda base: kept(
        ((base / "docs").mkdir(), (base / "docs" / "a.txt").write_text("x")), base / "docs"
    ),
    "a link to itself": lambda base: kept((base / "loop").symlink_to("loop"), base / "loop"),
    "a link to nothing": lambda base: kept((base / "link").symlink_to("nowhere"), base / "link"),
    "a named pipe": lambda base: kept(os.mkfifo(base / "pipe"), base / "pipe"),
    "a folder of checkpoints": folder_of_checkpoints,
    "a universal checkpoint": universal_folder,
    "the tensors of a universal checkpoint": lambda base: universal_folder(base) / "zero",
    "a folder of folders": lambda base: kept((base / "a" / "b").mkdir(parents=True), base / "a"),
    "a name longer than names may be": lambda base: base / ("x" * 300),
    "a name with a NUL": lambda base: f"{base}/a\0b",
    "a folder whose only file is empty": lambda base: kept(
        ((base / "e").mkdir(), (base / "e" / M0).touch()), base / "e"
    ),
    "a folder whose only file is a folder": lambda base: kept((base / "f" / M0).mkdir(parents=True), base / "f"),
}


@pytest.mark.parametrize("kind", INPUTS)
def test_inputs_that_are_no_checkpoint_folder(tmp_path, capsys, kind):
    source = INPUTS[kind](tmp_path)
    before = snapshot(tmp_path)
    capsys.readouterr()
    assert convert(source, tmp_path / "out") == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("ds_to_universal: error: ")
    assert "internal error" not in line
    assert os.path.basename(source).partition("\0")[0] in line
    assert leftovers(tmp_path / "out") == []
    assert snapshot(tmp_path) == before


# What may stand beside a checkpoint, and is none of its files.

HARMLESS = {
    "an older copy in a folder": lambda f: shutil.copytree(f, f.parent / "c") and (f.parent / "c").rename(f / "backup"),
    "a larger run in a folder": lambda f: zero(1, dp=5).save(f / "global_step3"),
    "another stage in a folder": lambda f: zero(3).save(f / "zero3"),
    "a universal checkpoint in a folder": lambda f: convert(f, f / "universal"),
    "a temporary file of a save": lambda f: (f / (O1 + ".tmp")).write_bytes(b"half"),
    "a copy under another name": lambda f: copy_file(f, O1, O1.replace(".pt", " (1).pt")),
    "a backup under another name": lambda f: copy_file(f, M0, M0 + ".bak"),
    "a name that is like one": lambda f: copy_file(f, O1, "x" + O1),
    "a name in capitals": lambda f: copy_file(f, M0, M0.upper()),
    "a name with other digits": lambda f: copy_file(f, O1, rank_of(O1, "٣")),
    "an editor's file": lambda f: (f / ("." + M0 + ".swp")).write_bytes(b"b0VIM"),
    "a scheduler": lambda f: save({"last_epoch": 3, "of": Foreign(a=1)}, f / "scheduler.pt"),
    "random states": lambda f: [save({"cpu": torch.zeros(2)}, f / f"random_states_{n}.pkl") for n in range(2)],
    "DeepSpeed's script": lambda f: (f / "zero_to_fp32.py").write_text("raise SystemExit('never run')"),
    "consolidated weights": lambda f: (f / "model.safetensors").write_bytes(b"\0" * 10),
    "a configuration": lambda f: (f / "config.json").write_text("{"),
    "a link out of the folder": lambda f: (f / "latest").symlink_to("/etc/hostname"),
    "a link to itself": lambda f: (f / "loop").symlink_to("loop"),
    "a named pipe": lambda f: os.mkfifo(f / "pipe"),
    "a folder that may not be entered": lambda f: (f / "locked").mkdir(mode=0),
    "states offloaded to disk": lambda f: (f / "offloaded_tensors" / "rank0").mkdir(parents=True),
}


@pytest.mark.parametrize("kind", HARMLESS)
def test_what_stands_beside_a_checkpoint_does_not_matter(tmp_path, kind):
    made = zero(1)
    folder = Path(made.save(tmp_path / "ckpt"))
    HARMLESS[kind](folder)
    assert convert(folder, tmp_path / "out") == 0
    assert wrong(made, tmp_path / "out") == []
    top = {name for name in os.listdir(tmp_path / "out") if not name.startswith("affine")}
    assert top == {"zero", M0}


# The same through the command as a user starts it.

STARTED = {
    "cut": ("ZeRO-1", lambda f: CUT["cut in the middle"](f / O1), O1),
    "emptied": ("ZeRO-3", lambda f: CUT["emptied"](f / Z0), Z0),
    "text": ("ZeRO-2, tensor parallel", lambda f: REPLACED["text"](f / M1), M1),
    "a named pipe": ("ZeRO-1", lambda f: REPLACED["a named pipe"](f / O0), O0),
    "a flipped byte": ("ZeRO-3", lambda f: STORED["middle"](storages(f / O1)[-1])(f / O1), O1),
    "a missing rank": FOLDERS["a rank missing"],
    "a doubled rank": FOLDERS["a rank doubled, ZeRO-3"],
    "a mixture": FOLDERS["another stage mixed in"],
}


@pytest.mark.parametrize("kind", STARTED)
def test_the_command_itself_says_so_in_one_line(tmp_path, folders, kind):
    checkpoint, edit, subject = STARTED[kind]
    folder = tmp_path / "ckpt"
    shutil.copytree(folders[checkpoint], folder)
    edit(folder)
    before = snapshot(folder)
    script = "import sys; from deepspeed_affine.cli import ds_to_universal as main; sys.exit(main())"
    command = [sys.executable, "-c", script, "--affine", "--input_folder", str(folder)]
    command += ["--output_folder", str(tmp_path / "out")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 2
    (line,) = ended.stderr.strip().splitlines()
    assert line.startswith("ds_to_universal: error: ")
    assert all(part in line for part in ([subject] if isinstance(subject, str) else subject))
    assert sorted(os.listdir(tmp_path)) == ["ckpt"]
    assert snapshot(folder) == before


# The output itself: ``verify`` sees every damage, and names the file.

OUTPUTS = {
    "a tensor": "zero/up.weight/exp_avg.pt",
    "a number": "zero/bias/step.pt",
    "the shared optimizer state": "zero/optimizer_state.pt",
    "copied model states": M0,
    "the manifest": "affine_manifest.json",
}


@pytest.fixture(scope="module")
def universal(tmp_path_factory):
    base = tmp_path_factory.mktemp("universal")
    assert convert(zero(1).save(base / "ckpt"), base / "out") == 0
    return base / "out"


def applicable(kind, damage):
    """The manifest is no archive, so nothing of one can be flipped in it; bytes are in test_verify.py."""
    of_archives = damage[0] == "flipped" or damage[1] in ("itself compressed", "cut before its end")
    return kind != "the manifest" or not (of_archives or "pickle" in damage[1] or "directory" in damage[1])


VERIFIED = [(kind, damage) for kind in OUTPUTS for damage in ONE_FILE if applicable(kind, damage)]


@pytest.mark.parametrize(
    ("kind", "damage"), VERIFIED, ids=lambda value: value if isinstance(value, str) else " ".join(value)
)
def test_one_damaged_file_of_the_output(tmp_path, capsys, universal, kind, damage):
    folder = tmp_path / "out"
    shutil.copytree(universal, folder)
    path = folder / OUTPUTS[kind]
    ONE_FILE[damage](path)
    before = snapshot(folder)
    code = ds_affine(["verify", str(folder)])
    said = capsys.readouterr()
    assert code in (1, 2)
    assert path.name in said.out + said.err
    assert "Traceback" not in said.out + said.err
    assert "internal error" not in said.out + said.err
    assert snapshot(folder) == before
    assert sorted(os.listdir(tmp_path)) == ["out"]


def test_the_tables_are_as_long_as_they_claim():
    assert len(ONE_FILE) > 40
    assert len(CONTRADICTIONS) > 100
    assert len(FOLDERS) > 25
