"""An output proved against the checkpoint it should have been made from: every element, through the maps.

First the conversion is run against a sink that compares, which proves files byte for byte and reads source and output
once. A file that is not what would be written is then compared as an object: what it says, and its tensors element
by element, whoever wrote it. Nothing is rebuilt and nothing is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from deepspeed_affine.commands.identity import conversion_identity
from deepspeed_affine.commands.policies import settle_drift, settle_identical
from deepspeed_affine.commands.text import listed
from deepspeed_affine.commands.verify_elements import Elements, damaged_storages
from deepspeed_affine.commands.verify_findings import Finding, Outcome
from deepspeed_affine.commands.verify_manifest import (
    Name,
    Names,
    Settings,
    compare_names,
    compare_sizes,
    compare_spelling,
    compare_sums,
)
from deepspeed_affine.commands.verify_structure import (
    Pairs,
    Planned,
    Structure,
    name_of_planned,
    read_structure,
    whole_storages,
)
from deepspeed_affine.errors import AffineError, CheckpointFormatError, Faults, IntegrityError
from deepspeed_affine.execute.checkpoint import Checkpoint, read_checkpoint
from deepspeed_affine.execute.claims import SourceSums
from deepspeed_affine.execute.comparing import ComparingSink
from deepspeed_affine.execute.conversion import ConversionOptions, build_plan
from deepspeed_affine.execute.convert import ExecutionOptions, write_files
from deepspeed_affine.execute.distributed import SingleGroup
from deepspeed_affine.execute.gather import PieceReader
from deepspeed_affine.execute.prove import find_drift
from deepspeed_affine.lowering.policy import IdenticalShards, OnDrift, ScaledStates
from deepspeed_affine.lowering.stock_rules import StockRules
from deepspeed_affine.plan.conversion import ConversionPlan, CopiedFile, SourceStorage
from deepspeed_affine.storage.files import ByteReader, join
from deepspeed_affine.storage.listing import list_files
from deepspeed_affine.storage.manifest import MANIFEST_NAME, Manifest, identity_differences

__all__ = ["Choices", "verify_against"]


@dataclass(frozen=True, slots=True)
class Choices:
    """The choices that decide what a conversion writes, and the version of DeepSpeed whose habits it follows."""

    deepspeed: str
    on_drift: OnDrift = OnDrift.ERROR
    scaled_states: ScaledStates = ScaledStates.REFUSE
    identical_shards: IdenticalShards = IdenticalShards.REFUSE
    inject_missing_state: bool = False

    def to_dict(self) -> dict[str, Any]:
        """The choices as an identity records them."""
        return {
            "inject_missing_state": self.inject_missing_state,
            "on_drift": self.on_drift.value,
            "scaled_states": self.scaled_states.value,
            "identical_shards": self.identical_shards.value,
        }


def verify_against(
    folder: str,
    source: str,
    manifest: Manifest | None,
    choices: Choices,
    settings: Settings,
    *,
    source_crc: bool = True,
) -> Outcome:
    """Every file of ``folder``, and every element in it, compared with what converting ``source`` gives.

    ``manifest`` is the folder's, None where it has none. Raises the error of a source that cannot be converted with
    these ``choices``: then there is nothing to compare with.
    """
    return _Proof(folder, read_checkpoint(source), manifest, choices, settings, source_crc).run()


class _Proof:
    def __init__(
        self,
        folder: str,
        checkpoint: Checkpoint,
        manifest: Manifest | None,
        choices: Choices,
        settings: Settings,
        source_crc: bool,
    ) -> None:
        self.folder = folder
        self.checkpoint = checkpoint
        self.manifest = manifest
        self.choices = choices
        self.settings = settings
        self.source_crc = source_crc
        self.outcome = Outcome(folder, checkpoint.folder.path)
        self.damaged: list[tuple[SourceStorage, IntegrityError]] = []

    def run(self) -> Outcome:
        outcome, manifest = self.outcome, self.manifest
        identity: Mapping[str, Any] = {}
        if manifest is not None:
            identity = conversion_identity(
                self.checkpoint.folder, self.choices.to_dict(), deepspeed=self.choices.deepspeed
            )
            lines = identity_differences(manifest.identity, identity)
            outcome.notes += [f"since the conversion: {line}" for line in lines]
        with ByteReader() as reader:
            plan = self._plan_or_why(reader, identity)
            files: tuple[Planned, ...] = (*plan.tensors, *plan.objects, *plan.copies)
            planned = {file.path: file for file in files}
            names: Names = {path: name_of_planned(file) for path, file in planned.items()}
            listing = list_files(self.folder)
            outcome.findings += compare_names(names, listing, "part of a conversion of the source")
            if manifest is not None:
                outcome.findings += compare_sizes(manifest, listing)
                outcome.findings += compare_spelling(self.folder, manifest, reader)
                outcome.findings += _contradictions(manifest, plan, names)
                outcome.notes += _other_layouts(manifest, plan)
            sizes = {path: size for path in names if (size := listing.get(path)) is not None}
            outcome.files = len(names)
            if self.settings.quick:
                self._sampled(plan, {path: planned[path] for path in sizes}, reader)
            else:
                self._whole(plan, planned, sizes, reader)
        outcome.source_faults += [fault for _, fault in self.damaged]
        if manifest is not None and outcome.different:
            outcome.findings += _other_source(manifest.identity, identity)
        return outcome

    def _plan_or_why(self, reader: ByteReader, identity: Mapping[str, Any]) -> ConversionPlan:
        """The plan; a source that does not convert may be another one than the folder was made from, which is said."""
        try:
            return self._plan(reader)
        except AffineError as error:
            faults = Faults()
            faults.add(error)
            path = join(self.folder, MANIFEST_NAME)
            for found in _other_source(self.manifest.identity, identity) if self.manifest is not None else ():
                faults.add(CheckpointFormatError(f"{path}: {found.detail}. Check the path after --against.", file=path))
            faults.raise_if_any()
            raise

    def _plan(self, reader: ByteReader) -> ConversionPlan:
        choices, group = self.choices, SingleGroup()
        options = ConversionOptions(
            rules=StockRules.for_version(choices.deepspeed),
            # What strictness refuses it does not convert otherwise.
            strict=False,
            inject_missing_state=choices.inject_missing_state,
            on_drift=choices.on_drift,
            scaled_states=choices.scaled_states,
        )
        plan, suspects = build_plan(self.checkpoint, options)
        plan = settle_identical(self.checkpoint, options, plan, suspects, choices.identical_shards, reader, group)
        if self.settings.quick and choices.on_drift is not OnDrift.AVERAGE:
            # What is written are the first copies, and to compare all of them would take as long as a conversion.
            return plan
        drifts = find_drift(plan, PieceReader(plan.storages, reader), self.settings.workers)
        return settle_drift(plan, drifts, choices.on_drift, reader, group, check=self.source_crc)

    def _whole(
        self, plan: ConversionPlan, planned: Mapping[str, Planned], sizes: Mapping[str, int], reader: ByteReader
    ) -> None:
        settings, outcome, manifest = self.settings, self.outcome, self.manifest
        sink = ComparingSink(self.folder, sizes, reader)
        execution = ExecutionOptions(
            settings.workers, self.source_crc, fsync=False, progress=settings.progress, what="verifying"
        )
        written = write_files(plan, reader, sink, execution, wanted=sizes)
        outcome.nbytes = sum(sizes.values())
        if self.source_crc:
            sums = SourceSums(plan.checked_storages)
            for entry in written.files.values():
                sums.add(entry.reads)
            self.damaged = damaged_storages(sums, reader, execution)
        for path in sizes:
            file = None if manifest is None else manifest.files.get(path)
            if path not in sink.unlike and file is not None and file.crc32 != written.files[path].crc32:
                detail = f"its manifest records checksum {file.crc32:08x}, and what is right has "
                detail += f"{written.files[path].crc32:08x}"
                outcome.findings.append(Finding("manifest", path, detail, *name_of_planned(planned[path])))
        unlike = {path: planned[path] for path in sizes if path in sink.unlike}
        structures = self._structures(unlike)
        elements = self._pair(plan, structures, reader)
        elements.compare_all()
        self._judge(elements)
        self._unexplained(plan, structures, sink.unlike, sizes, reader)

    def _sampled(self, plan: ConversionPlan, planned: Mapping[str, Planned], reader: ByteReader) -> None:
        elements = self._pair(plan, self._structures(planned), reader)
        self.outcome.sampled = elements.compare_some()
        self.outcome.nbytes = self.outcome.sampled.nbytes
        suspects = elements.suspects() if self.source_crc else []
        execution = ExecutionOptions(self.settings.workers)
        self.damaged = damaged_storages(SourceSums(suspects), reader, execution)
        self._judge(elements)

    def _structures(self, planned: Mapping[str, Planned]) -> list[Structure]:
        with ThreadPoolExecutor(self.settings.workers) as pool:
            return list(pool.map(lambda file: read_structure(file, self.folder), planned.values()))

    def _pair(self, plan: ConversionPlan, structures: Iterable[Structure], reader: ByteReader) -> Elements:
        pairs = Pairs()
        for structure in structures:
            self.outcome.findings += [*structure.findings, *pairs.add(structure)]
        return Elements(plan, pairs, reader, self.settings)

    def _judge(self, elements: Elements) -> None:
        damaged = {(storage.file, storage.key) for storage, _ in self.damaged}
        self.outcome.findings += elements.findings(damaged)

    def _unexplained(
        self,
        plan: ConversionPlan,
        structures: Iterable[Structure],
        offsets: Mapping[str, int],
        sizes: Mapping[str, int],
        reader: ByteReader,
    ) -> None:
        """Files whose objects are right and whose bytes are not those that would be written: another writer's, or
        changed where no tensor shows it."""

        def rest() -> list[Structure]:
            explained = {finding.file for finding in self.outcome.findings}
            return [structure for structure in structures if structure.planned.path not in explained]

        elements = self._pair(plan, map(whole_storages, rest()), reader)
        elements.compare_all()
        self._judge(elements)
        for structure in rest():
            path = structure.planned.path
            if isinstance(structure.planned, CopiedFile):
                detail = f"is not the source's file: byte {offsets[path]} is the first that differs, outside of tensors"
                self.outcome.findings.append(Finding("bytes", path, detail))
        if self.manifest is not None:
            left = {structure.planned.path for structure in rest()}.intersection(self.manifest.files)
            summed = {path: sizes[path] for path in sorted(left)}
            quiet = replace(self.settings, progress=False)
            self.outcome.findings += compare_sums(self.folder, summed, self.manifest, reader, quiet)


def _other_source(recorded: Mapping[str, Any], asked: Mapping[str, Any]) -> list[Finding]:
    """That the output was made from another checkpoint, which explains what else differs."""
    key = "source"
    if key not in recorded:
        return []
    lines = identity_differences({key: recorded[key]}, {key: asked[key]})
    said = f"says that this output was made from another checkpoint: {listed(lines, 3)}"
    return [Finding("source", MANIFEST_NAME, said)] if lines else []


def _contradictions(manifest: Manifest, plan: ConversionPlan, names: Names) -> list[Finding]:
    """What the manifest says of files and parameters that the plan does not."""
    findings = []
    for path in sorted({*names, *manifest.files}):
        if path not in manifest.files:
            findings.append(Finding("manifest", MANIFEST_NAME, f"does not list {path}"))
        elif path not in names:
            findings.append(Finding("manifest", MANIFEST_NAME, f"lists {path}, which is no part of the conversion"))
        elif (held := (manifest.files[path].param, manifest.files[path].state)) != names[path]:
            detail = f"says {path} holds {_owner(held)}; it holds {_owner(names[path])}"
            findings.append(Finding("manifest", MANIFEST_NAME, detail, *names[path]))
    shapes = {task.param: task.shape for task in reversed(plan.tensors)}
    for param in sorted({*shapes, *manifest.parameters}):
        known = manifest.parameters.get(param)
        if known is None or shapes.get(param) != known.shape:
            said = "nothing" if known is None else f"shape {list(known.shape)}"
            right = f"it has shape {list(shapes[param])}" if param in shapes else "there is no such parameter"
            findings.append(Finding("manifest", MANIFEST_NAME, f"says {said} of parameter {param!r}; {right}", param))
    return findings


def _owner(name: Name) -> str:
    param, state = name
    return "no parameter's state" if param is None else f"state {state!r} of parameter {param!r}"


def _other_layouts(manifest: Manifest, plan: ConversionPlan) -> list[str]:
    """Parameters that were put together by another map than the source's; what they hold may be the same."""
    ids = {layout: layout.layout_id() for layout in set(plan.layouts.values())}
    other = sorted(
        param
        for param, layout in plan.layouts.items()
        if param in manifest.parameters and manifest.parameters[param].layout != ids[layout]
    )
    if not other:
        return []
    more = f" and {len(other) - 1} more" if len(other) > 1 else ""
    return [f"since the conversion: the layout of parameter {other[0]!r}{more} is another"]
