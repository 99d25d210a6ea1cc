"""The table of acceptance 2: every legacy key alone and combined, cut by the rules the writers use.

A case is plain data, so that a DeepSpeed of another version can run it in another process.
"""

import re
import zlib

import torch
from deepspeed.checkpoint import affine
from deepspeed.module_inject.layers import _partition_logical_tensor
from deepspeed.module_inject.tp_shard import AutoTPMeta, get_shard_size_list

NAME = "model.layers.0.block.weight"
KEY = f"^{re.escape(NAME)}$"
DEGREES = (1, 2, 3, 4, 8)
STATES = ("fp32", "exp_avg", "exp_avg_sq")


def _states(case_id, shape, cut, dtype, states):
    generator = torch.Generator().manual_seed(zlib.crc32(case_id.encode()))
    full = {state: torch.randn(shape, generator=generator).to(dtype) for state in states}
    return full, {state: [shard.contiguous() for shard in cut(tensor)] for state, tensor in full.items()}


def make(case_id, info, shape, cut, *, needs=(), dtype=torch.float32, dp=2, states=STATES, view=None, rows=None):
    """``needs`` names what a DeepSpeed must be able to read: uneven, widths, count, absent, map."""
    full, shards = _states(case_id, shape, cut, dtype, states)
    first = next(iter(shards.values()))
    if view is not None:
        full = {state: tensor.reshape(view) for state, tensor in full.items()}
    if rows is not None:
        full = {state: tensor[:rows] for state, tensor in full.items()}
    return {
        "id": case_id,
        "name": NAME,
        "info": {"universal_checkpoint_version": 0.2, **info},
        "tp": len(first),
        "shapes": [tuple(shard.shape) for shard in first],
        "states": shards,
        "dp": dp,
        "needs": set(needs),
        "full": full,
    }


def replicas(tp):
    return lambda full: [full] * tp


def even(tp, dim=0):
    return lambda full: list(full.chunk(tp, dim))


def sized(sizes, dim=0):
    return lambda full: list(full.split(list(sizes), dim))


def sub_params(sizes, widths, dim, tp, view=None, physical=None):
    """The real AutoTP rule: cut the view's sub-parameters, then store the shard in the parameter's own rank."""

    def cut(full):
        viewed = full if view is None else full.reshape(view)
        shards = [_partition_logical_tensor(viewed, dim, tp, rank, widths, sizes) for rank in range(tp)]
        return shards if physical is None else [physical(shard) for shard in shards]

    return cut


def halves(tp):
    """Megatron's fused SwiGLU: each half is cut, and a rank holds its part of both."""
    return lambda full: [torch.cat(pair) for pair in zip(*(half.chunk(tp) for half in full.chunk(2)), strict=True)]


def two_dim(shard):
    return shard.reshape(-1, shard.shape[-1])


def autotp_widths(size, tp, heads=None):
    return get_shard_size_list(size, tp, AutoTPMeta(num_kv_heads=heads), None)


def _whole_cases():
    for tp in DEGREES:
        for shape in ((), (5,), (4, 6), (2, 3, 4)):
            tag = f"tp{tp}-{len(shape)}d"
            yield make(f"replicated-{tag}", {"tp_replicated_parameter_patterns": [KEY]}, shape, replicas(tp))
            if tp != 3:
                yield make(f"average-{tag}", {"parameter_to_average_patterns": [KEY]}, shape, replicas(tp))
    for tp in (2, 4, 8):
        yield make(
            f"average-bf16-tp{tp}",
            {"parameter_to_average_patterns": [KEY]},
            (64, 64),
            replicas(tp),
            dtype=torch.bfloat16,
        )


def _concatenated_cases():
    for tp in DEGREES:
        for shape in ((24,), (24, 5), (24, 2, 3)):
            yield make(f"column-tp{tp}-{len(shape)}d", {}, shape, even(tp), dp=3)
        for shape in ((5, 24), (3, 24, 2)):
            info = {"parameter_with_row_parallelism_patterns": [r".*block\.weight"]}
            yield make(f"row-tp{tp}-{len(shape)}d", info, shape, even(tp, 1))
        for rows, padded in ((13, 24), (24, 24), (20, 24)):
            info = {"vocabulary_parameter_patterns": [KEY], "original_vocab_size": rows}
            yield make(f"vocab{rows}-tp{tp}", info, (padded, 4), even(tp), rows=rows)
    yield make("column-bf16", {}, (8, 6), even(2), dtype=torch.bfloat16)
    yield make("column-one-state", {}, (8, 6), even(2), states=("fp32",), needs=("absent",))
    for tp in (2, 3, 4, 8):
        widths = autotp_widths(13, tp)
        yield make(f"column-uneven-tp{tp}", {}, (13, 4), sized(widths), needs=("uneven",))
        info = {"parameter_with_row_parallelism_patterns": [KEY]}
        yield make(f"row-uneven-tp{tp}", info, (4, 13), sized(widths, 1), needs=("uneven",))
    both = {
        "parameter_with_row_parallelism_patterns": [KEY],
        "vocabulary_parameter_patterns": [KEY],
        "original_vocab_size": 7,
    }
    yield make("row+vocab", both, (8, 12), even(4, 1), rows=7)
    for key in ("tp_replicated_parameter_patterns", "parameter_to_average_patterns"):
        info = {key: [KEY], "vocabulary_parameter_patterns": [KEY], "original_vocab_size": 3}
        yield make(f"{key}+vocab", info, (8, 4), replicas(2), rows=3)
    every = {
        "tp_replicated_parameter_patterns": [KEY],
        "parameter_to_average_patterns": [KEY, "unused_average"],
        "parameter_with_row_parallelism_patterns": [KEY],
        "parameter_with_2_sub_params_cat_dim_0": [KEY],
        "parameter_with_sub_params": [{"patterns": ["unused", KEY], "shape": ((4, 4), 6), "partition_dim": 0}],
    }
    yield make("precedence-replicated", every, (8, 6), replicas(2))
    del every["tp_replicated_parameter_patterns"]
    yield make("precedence-average", dict(every), (8, 6), replicas(2))
    del every["parameter_to_average_patterns"]
    yield make("precedence-two", dict(every), (8, 6), halves(2))


def _two_cases():
    info = {"parameter_with_2_sub_params_cat_dim_0": [KEY]}
    for tp in DEGREES:
        for shape in ((48,), (48, 3), (48, 2, 2)):
            yield make(f"two-tp{tp}-{len(shape)}d", info, shape, halves(tp))
    both = {**info, "vocabulary_parameter_patterns": [KEY], "original_vocab_size": 9}
    yield make("two+vocab", both, (12, 2), halves(3), rows=9)

    def odd(full):
        # Each rank's height is odd, and the converter gives the odd row to the first half.
        first, second = full[:6], full[6:]
        return [torch.cat((first[i * 2 : i * 2 + 2], second[i : i + 1])) for i in range(3)]

    yield make("two-odd-height", info, (9, 4), odd)


def _rule(shape, dim, **extra):
    return {"parameter_with_sub_params": [{"patterns": [KEY], "shape": shape, "partition_dim": dim}], **extra}


def _sub_param_cases():
    for tp in DEGREES:
        for sizes in ((24, 24), (24, 24, 24), (48, 24, 24)):
            widths = [[size // tp] * tp for size in sizes]
            total = sum(sizes)
            tag = f"tp{tp}-{'_'.join(map(str, sizes))}"
            for version in (0.1, 0.2, 0.3, 0.4):
                extra = {"universal_checkpoint_version": version}
                needs = ()
                if version == 0.4:
                    extra["sub_param_shard_widths"] = {KEY: widths}
                info = _rule((sizes, -1), 0, **extra)
                yield make(f"sub-{version}-{tag}", info, (total, 3), sub_params(sizes, widths, 0, tp), needs=needs)
            info = _rule((sizes,), 0)
            yield make(f"sub-1d-{tag}", info, (total,), sub_params(sizes, widths, 0, tp))
            info = _rule([2, sizes, 3], 1)
            cut = sub_params(sizes, widths, 1, tp, view=(2, total, 3), physical=two_dim)
            yield make(f"sub-3d-view-{tag}", info, (2 * total, 3), cut, view=(2, total, 3))
            info = _rule((3, sizes), 1)
            yield make(f"sub-dim1-{tag}", info, (3, total), sub_params(sizes, widths, 1, tp))
            info = _rule((2, 3, sizes), 2)
            yield make(f"sub-3d-last-{tag}", info, (2, 3, total), sub_params(sizes, widths, 2, tp))
        for count in (2, 3):
            sizes = (24,) * count
            widths = [[24 // tp] * tp] * count
            info = _rule((count, -1), 0)
            cut = sub_params(sizes, widths, 0, tp)
            yield make(f"count{count}-tp{tp}", info, (24 * count, 3), cut, needs=("count",))
    for tp, heads in ((2, 3), (4, 6), (8, 4), (3, 5)):
        sizes = (heads * 4, heads * 2, heads * 2)
        widths = [autotp_widths(size, tp, heads) for size in sizes]
        info = _rule(
            [sizes, -1], 0, universal_checkpoint_version=0.4, sub_param_shard_widths={KEY: [list(w) for w in widths]}
        )
        cut = sub_params(sizes, widths, 0, tp)
        yield make(f"widths-uneven-tp{tp}", info, (sum(sizes), 3), cut, needs=("uneven", "widths"))
        spec = (2, sizes, 3)
        info = _rule(spec, 1, universal_checkpoint_version=0.4, sub_param_shard_widths={KEY: widths})
        cut = sub_params(sizes, widths, 1, tp, view=(2, sum(sizes), 3), physical=two_dim)
        needs = ("uneven", "widths")
        yield make(f"widths-3d-tp{tp}", info, (2 * sum(sizes), 3), cut, needs=needs, view=(2, sum(sizes), 3))
    sizes, widths = (8, 8), [[4, 4], [4, 4]]
    both = _rule((sizes, 3), 0, vocabulary_parameter_patterns=[KEY], original_vocab_size=11)
    yield make("sub+vocab", both, (16, 3), sub_params(sizes, widths, 0, 2), rows=11)
    two_rules = {
        "parameter_with_sub_params": [
            {"patterns": ["nothing"], "shape": (3, 3), "partition_dim": 0},
            {"patterns": [r"model\..*\.weight"], "shape": [(8, 8), 3], "partition_dim": 0},
            {"patterns": [KEY], "shape": ((4, 4), 3), "partition_dim": 0},
        ]
    }
    yield make("sub-first-rule-wins", two_rules, (16, 3), sub_params(sizes, widths, 0, 2))


def _document(built, *, draft=False):
    entries = {KEY: built.to_dict()}
    return {"affine_map": {"version": 1, **entries} if draft else {"version": 1, "params": entries}}


def _map_cases():
    """Maps built by DeepSpeed's own builders; ``map`` marks layouts only a map describes."""
    for tp in DEGREES:
        info = {"tp_replicated_parameter_patterns": [KEY], **_document(affine.replicated_map((4, 6), tp))}
        yield make(f"map-replicated-tp{tp}", info, (4, 6), replicas(tp))
        widths = [24 // tp] * tp
        rows = {"parameter_with_row_parallelism_patterns": [KEY]}
        built = affine.contiguous_split_map((5, 24), widths, 1)
        yield make(f"map-row-tp{tp}", {**rows, **_document(built)}, (5, 24), even(tp, 1))
        yield make(f"map-draft-row-tp{tp}", {**rows, **_document(built, draft=True)}, (5, 24), even(tp, 1))
        vocab = {"vocabulary_parameter_patterns": [KEY], "original_vocab_size": 13}
        built = affine.contiguous_split_map((24, 5), widths, 0)
        yield make(f"map-vocab-tp{tp}", {**vocab, **_document(built)}, (24, 5), even(tp), rows=13)
        sizes = (48, 24, 24)
        split = [[size // tp] * tp for size in sizes]
        built = affine.sub_param_map((96, 3), sizes, split, 0)
        info = _rule((sizes, -1), 0, universal_checkpoint_version=0.4, sub_param_shard_widths={KEY: split})
        yield make(f"map-sub-tp{tp}", {**info, **_document(built)}, (96, 3), sub_params(sizes, split, 0, tp))
    for tp, heads in ((2, 3), (3, 5), (8, 4)):
        widths = autotp_widths(heads * 4, tp, heads)
        built = affine.contiguous_split_map((heads * 4, 3), widths, 0)
        yield make(f"map-uneven-tp{tp}", _document(built), (heads * 4, 3), sized(widths), needs=("uneven",))
    for tp in (2, 4):

        def bigcode(full, tp=tp):
            return [torch.cat((part, full[32:])) for part in full[:32].chunk(tp)]

        built = affine.segmented_map((48, 8), [(32, False), (16, True)], 0, tp, [[32 // tp] * tp])
        # The category only stops converters that cannot read the map: the slices are not equal.
        info = {"tp_replicated_parameter_patterns": [KEY], **_document(built)}
        yield make(f"map-bigcode-tp{tp}", info, (48, 8), bigcode, needs=("map",))
    built = affine.block_gather_map((8, 32), {0: [0, 2], 1: [1, 3]}, 8, 1)

    def gathered(full):
        blocks = full.chunk(4, 1)
        return [torch.cat((blocks[rank], blocks[rank + 2]), 1) for rank in range(2)]

    info = {"tp_replicated_parameter_patterns": [KEY], **_document(built)}
    yield make("map-gather", info, (8, 32), gathered, needs=("map",))


def all_cases():
    return [*_whole_cases(), *_concatenated_cases(), *_two_cases(), *_sub_param_cases(), *_map_cases()]
