"""What a conversion does where bytes contradict the metadata: identical shards, and copies that have drifted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from deepspeed_affine.errors import Faults, IntegrityError
from deepspeed_affine.execute.checkpoint import Checkpoint
from deepspeed_affine.execute.conversion import ConversionOptions, Suspect, build_plan
from deepspeed_affine.execute.distributed import Group
from deepspeed_affine.execute.gather import PieceReader
from deepspeed_affine.execute.prove import Drift, drifted_storages, shards_identical
from deepspeed_affine.execute.shared import check_all_storages, share
from deepspeed_affine.lowering.policy import IdenticalShards, OnDrift
from deepspeed_affine.plan.conversion import ConversionPlan
from deepspeed_affine.storage.files import ByteReader

__all__ = ["averaged", "identical_params", "settle_drift", "settle_identical"]


def settle_identical(
    checkpoint: Checkpoint,
    options: ConversionOptions,
    plan: ConversionPlan,
    suspects: tuple[Suspect, ...],
    policy: IdenticalShards,
    reader: ByteReader,
    group: Group,
) -> ConversionPlan:
    """The plan with every parameter whose shards are byte-identical, in every state, treated as ``policy`` says.

    One that no metadata names is taken for replicated, unless the policy is to split it: bytes say more than a default.
    Raises IntegrityError naming each where the policy is to refuse.
    """
    if policy is IdenticalShards.SPLIT:
        return plan
    mine = set(share({suspect.param: _stored_bytes(suspect, plan) for suspect in suspects}, group))
    found = identical_params(plan, [suspect for suspect in suspects if suspect.param in mine], reader)
    identical = {name for part in group.gather(found) for name in part}
    unnamed = {suspect.param for suspect in suspects if suspect.unnamed and suspect.param in identical}
    replicated = identical if policy is IdenticalShards.REPLICATED else unnamed
    faults = Faults()
    for name in sorted(identical - replicated):
        faults.add(
            IntegrityError(
                f"parameter {name!r}: its shards are byte-identical on all {checkpoint.tp_degree} tensor-parallel "
                "ranks, in every state, while its metadata says they are parts; DeepSpeed would write it "
                f"{checkpoint.tp_degree} times over. Choose --identical-shards replicated (one copy; right for norms "
                "and biases that DeepSpeed 0.18.9 forgot to list) or split (concatenate).",
                param=name,
            )
        )
    group.raise_together(faults)
    if not replicated:
        return plan
    plan = build_plan(checkpoint, replace(options, replicated=frozenset(replicated)))[0]
    notes = (
        f"{name}: no pattern names it and every rank holds the same bytes; written once" for name in sorted(unnamed)
    )
    return replace(plan, notes=(*plan.notes, *notes))


def identical_params(plan: ConversionPlan, suspects: Sequence[Suspect], reader: ByteReader) -> list[str]:
    """The parameters of ``suspects`` whose shards are byte-identical in every state."""
    pieces = PieceReader(plan.storages, reader)
    return [suspect.param for suspect in suspects if all(shards_identical(shards, pieces) for shards in suspect.states)]


def _stored_bytes(suspect: Suspect, plan: ConversionPlan) -> int:
    total = 0
    for shards in suspect.states:
        for shard in shards:
            for piece in shard.pieces:
                (index,) = piece.locations
                total += piece.numel * plan.storages[index].itemsize
    return total


def settle_drift(
    plan: ConversionPlan, drifts: Sequence[Drift], policy: OnDrift, reader: ByteReader, group: Group, *, check: bool
) -> ConversionPlan:
    """The plan with drifted copies treated as ``policy`` says; raises IntegrityError naming each where it refuses.

    With ``check`` the storages behind them are compared with their recorded checksums first: damage on a disk looks
    like drift, and must not be averaged away.
    """
    if drifts and check:
        check_all_storages(drifted_storages(plan, drifts), reader, group)
    if policy is OnDrift.ERROR:
        faults = Faults()
        for drift in drifts:
            faults.add(
                IntegrityError(
                    f"{drift.describe()}. Copies of one value must agree; choose --on-drift average or first to "
                    "convert knowingly.",
                    param=drift.param,
                )
            )
        group.raise_together(faults)
    if policy is not OnDrift.AVERAGE:
        return plan
    # Where replicas agree the value itself is kept: a sum may round what an average of equals would not.
    drifted = {(drift.param, drift.state) for drift in drifts}
    tensors = tuple(
        replace(task, fill="average") if (task.param, task.state) in drifted else task for task in plan.tensors
    )
    return replace(plan, tensors=tensors)


def averaged(plan: ConversionPlan) -> list[str]:
    """The parameters of which some state is written as the average of its copies."""
    return sorted({task.param for task in plan.tensors if task.fill == "average"})
