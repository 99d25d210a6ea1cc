"""Parameters moved between two live topologies of one torch.distributed job, point to point.

What is sent follows from the plan alone (``plan.messages``), and when from it too (``plan.rounds``, which also says why
no process waits for ever). While a round is under way a process packs what it sends in the next and unpacks what it
received in the last: it holds at most two messages each way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Literal

import torch

from deepspeed_affine.errors import Faults, PolicyError
from deepspeed_affine.execute.live_schedule import Turn, schedule_of
from deepspeed_affine.execute.live_sides import ONE, Sides, agreed
from deepspeed_affine.execute.memory import as_words, strided_view, times, word_view
from deepspeed_affine.execute.wire import Pending, Wire
from deepspeed_affine.ir import Region
from deepspeed_affine.ir.ints import INT64_MAX, row_major_strides, shown
from deepspeed_affine.plan.messages import LEAST_BYTES, Message, cut, is_run
from deepspeed_affine.plan.model import ModelPlan
from deepspeed_affine.plan.segments import TransferSegment
from deepspeed_affine.plan.transfer_plan import TransferPlan

__all__ = ["STAGING_BYTES", "TIMEOUT_SECONDS", "TransferReport", "transfer"]

STAGING_BYTES = 64 << 20
LEAST_STAGING_BYTES = 8 * LEAST_BYTES

TIMEOUT_SECONDS = 300.0

WINDOW_ROUNDS = 16
"""After so many rounds all processes meet, so that one that is to wait for the last round is not taken to hang."""

MOST_POWER = 16
"""Of a scale; Adam's second moment has -2."""

SCALED_ELEMENT_BYTES = 48
"""What multiplying one element may take: it and the product as complex doubles, and the result."""

Shards = Mapping[str, "torch.Tensor | None"]
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class TransferReport:
    """What one process did. Bytes are of elements; ``staging_bytes`` is the most that was held at a time.

    ``batches`` counts the rounds in which the process sent or received. ``unfilled`` has by parameter the addresses of
    this process's target shard that the plan does not fill: a vocabulary's padding, which is as it was.
    """

    rank: int
    bytes_sent: int
    bytes_received: int
    bytes_copied: int
    messages_sent: int
    messages_received: int
    batches: int
    rounds: int
    staging_bytes: int
    unfilled: Mapping[str, tuple[Region, ...]]


def transfer(
    source: Shards | torch.Tensor | None,
    target: Shards | torch.Tensor | None,
    plan: ModelPlan | TransferPlan,
    group: Any = None,
    *,
    staging_bytes: int = STAGING_BYTES,
    timeout: float = TIMEOUT_SECONDS,
    progress: Progress | None = None,
    scale_power: int = 1,
    scaled_states: Literal["refuse", "power"] = "refuse",
) -> TransferReport:
    """Fill this process's ``target`` shards from the ``source`` shards of all; every process of ``group`` calls it.

    ``source`` and ``target`` map parameter names to this process's own shards, dense and on one device, None or absent
    where it has none on that side; with the plan of a single parameter a tensor will do. The plan's ranks are ranks of
    ``group`` (by default the world). Bytes move as they are, whatever the dtype; scaled blocks are multiplied once,
    where they arrive, by the scale to ``scale_power``, which for optimizer states (a power other than 1) must be asked
    for with ``scaled_states="power"``.

    Before anything is written all processes compare plan, options, dtypes, devices and sizes, waiting for each other
    as long as the group's own timeout; a fault of any is one error on all. Then at most ``staging_bytes`` are held
    beside the shards, and no single exchange, nor ``WINDOW_ROUNDS`` of them together, may take longer than ``timeout``
    seconds: a process that ended or hangs is a JobError on the others, whose targets are then partly written.
    ``progress`` is called with the bytes this process has moved and will have moved in all.
    """
    wire = Wire(group, timeout if _is_timeout(timeout) else TIMEOUT_SECONDS)
    faults = Faults()
    whole = _as_model(plan, faults)
    _check_own_options(timeout, progress, faults)
    options = _checked_options(staging_bytes, scale_power, scaled_states, faults)
    sides = agreed(wire, whole, source, target, options, faults)
    with torch.no_grad():
        return _Moving(wire, whole, sides, staging_bytes, scale_power, progress).run()


def _as_model(plan: Any, faults: Faults) -> ModelPlan:
    if isinstance(plan, ModelPlan):
        return plan
    if isinstance(plan, TransferPlan):
        return ModelPlan({ONE: plan}, {})
    faults.add(PolicyError(f"The plan is {shown(plan)}; expected what plan_model or plan_transfer returns."))
    return ModelPlan({}, {})


def _is_timeout(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, (int, float)) and 0 < value < 1e9


def _check_own_options(timeout: Any, progress: Any, faults: Faults) -> None:
    """The options that may differ between processes."""
    if not _is_timeout(timeout):
        faults.add(PolicyError(f"timeout is {shown(timeout)}; expected a positive number of seconds."))
    if progress is not None and not callable(progress):
        faults.add(PolicyError(f"progress is {shown(progress)}; expected a function of two numbers."))


def _checked_options(staging: Any, power: Any, scaled_states: Any, faults: Faults) -> dict[str, str | int]:
    """The options that are to be equal everywhere, those that will not do left out: they are faults already."""
    options: dict[str, str | int] = {}
    if type(staging) is int and LEAST_STAGING_BYTES <= staging <= INT64_MAX:
        options["staging_bytes"] = staging
    else:
        faults.add(PolicyError(f"staging_bytes is {shown(staging)}; expected {LEAST_STAGING_BYTES} or more."))
    if type(power) is int and abs(power) <= MOST_POWER:
        options["scale_power"] = power
    else:
        faults.add(PolicyError(f"scale_power is {shown(power)}; expected an integer, at most {MOST_POWER} either way."))
    if isinstance(scaled_states, str) and scaled_states in ("refuse", "power"):
        options["scaled_states"] = scaled_states
    else:
        faults.add(PolicyError(f"scaled_states is {shown(scaled_states)}; expected 'refuse' or 'power'."))
    return options


@dataclass(frozen=True, slots=True)
class _Flying:
    """A turn under way, and where what is received lands."""

    turn: Turn
    landing: torch.Tensor | None
    pending: Pending


class _Moving:
    """One process's part of a transfer that all have agreed on."""

    def __init__(
        self, wire: Wire, plan: ModelPlan, sides: Sides, staging: int, power: int, progress: Progress | None
    ) -> None:
        self.wire = wire
        self.plan = plan
        self.sides = sides
        self.power = power
        self.progress = progress
        scales = sides.needs.scales if power else ()
        for scale in scales:
            # What cannot be multiplied is refused here, by all.
            times(torch.empty(0), Fraction(scale) ** power)
        self.scratch = staging // 4 if scales else 0
        self.limit = (staging - self.scratch) // 4
        self.schedule = schedule_of(plan, wire.rank, sides.itemsizes, self.limit)
        self.staging = _Staging(sides.device)
        self.done = 0
        self.sent = self.received = self.copied = 0

    def run(self) -> TransferReport:
        wire, rank = self.wire, self.wire.rank
        turns, last = self.schedule.turns, self.schedule.rounds
        for name, segment in self.schedule.local:
            self._copy(name, segment)
        for first in range(0, last, WINDOW_ROUNDS):
            stop = min(first + WINDOW_ROUNDS, last)
            self._window([turns[number] for number in range(first, stop) if number in turns], last)
            wire.during = f"after round {stop} of {last}"
            wire.confirm()
        unfilled = {name: each.unfilled[rank] for name, each in self.plan.plans.items() if rank in each.unfilled}
        return TransferReport(
            rank,
            self.sent,
            self.received,
            self.copied,
            len([turn for turn in turns.values() if turn.sent is not None]),
            len([turn for turn in turns.values() if turn.received is not None]),
            len(turns),
            last,
            self.staging.peak,
            unfilled,
        )

    def _window(self, turns: Sequence[Turn], last: int) -> None:
        """Take these turns, one after another."""
        flying: _Flying | None = None
        for at, turn in enumerate(turns):
            packed = None if turn.sent is None else self._packed(turn.sent, at % 2)
            landing = None if turn.received is None else self._landing(turn.received, at % 2)
            if flying is not None:
                self.wire.end(flying.pending)
            before = flying
            flying = _Flying(turn, landing, self.wire.begin(packed, turn.target, landing, turn.source))
            if before is not None:
                self._landed(before)
            self.wire.during = f"in round {turn.number + 1} of {last}"
        if flying is not None:
            self.wire.end(flying.pending)
            self._landed(flying)

    def _landing(self, message: Message, slot: int) -> torch.Tensor:
        direct = self._in_place(message, "target")
        return self.staging.of("received", slot, message.nbytes) if direct is None else direct

    def _landed(self, flown: _Flying) -> None:
        """The turn's messages have arrived, here and there."""
        sent, received = flown.turn.sent, flown.turn.received
        if received is not None and flown.landing is not None:
            if self._in_place(received, "target") is None:
                self._unpack(received, flown.landing)
            self.received += received.payload
            self._advance(received.payload)
        if sent is not None:
            self.sent += sent.payload
            self._advance(sent.payload)

    def _in_place(self, message: Message, side: Literal["source", "target"]) -> torch.Tensor | None:
        """The message's bytes in the shard itself, where they are one run there and arrive as they are."""
        if len(message.parts) > 1:
            return None
        part = message.parts[0]
        block = part.block
        if side == "source":
            flat, offset, strides = self.sides.source[part.param], block.source_offset, block.source_strides
        else:
            flat, offset, strides = self.sides.target[part.param], block.target_offset, block.target_strides
            if self._factor(block) != 1:
                return None
        if not is_run(block.shape, strides):
            return None
        return as_words(flat).view(torch.uint8)[offset * part.itemsize : offset * part.itemsize + part.nbytes]

    def _packed(self, message: Message, slot: int) -> torch.Tensor:
        found = self._in_place(message, "source")
        if found is not None:
            return found
        staged = self.staging.of("sent", slot, message.nbytes)
        for part in message.parts:
            flat, block = self.sides.source[part.param], part.block
            read = word_view(as_words(flat), flat, block.shape, block.source_offset, block.source_strides)
            staged[part.start : part.start + part.nbytes].view(read.dtype).view(read.shape).copy_(read)
        return staged

    def _unpack(self, message: Message, staged: torch.Tensor) -> None:
        for part in message.parts:
            flat, block = self.sides.target[part.param], part.block
            raw = staged[part.start : part.start + part.nbytes]
            if self._factor(block) == 1:
                written = word_view(as_words(flat), flat, block.shape, block.target_offset, block.target_strides)
                written.copy_(raw.view(written.dtype).view(written.shape))
            else:
                self._multiply(raw.view(flat.dtype), _packed_as_source(block), flat)

    def _copy(self, name: str, segment: TransferSegment) -> None:
        """What this process holds itself."""
        source, target = self.sides.source[name], self.sides.target[name]
        if self._factor(segment) == 1:
            read = word_view(as_words(source), source, segment.shape, segment.source_offset, segment.source_strides)
            written = word_view(as_words(target), target, segment.shape, segment.target_offset, segment.target_strides)
            written.copy_(read)
        else:
            self._multiply(source, segment, target)
        nbytes = segment.numel * self.sides.itemsizes[name]
        self.copied += nbytes
        self._advance(nbytes)

    def _multiply(self, source: torch.Tensor, segment: TransferSegment, target: torch.Tensor) -> None:
        """The segment scaled, in parts whose products fit into the scratch memory."""
        factor = self._factor(segment)
        for each in cut(segment, max(1, self.scratch // SCALED_ELEMENT_BYTES)):
            self.staging.note(each.numel * SCALED_ELEMENT_BYTES)
            block = strided_view(source, each.shape, each.source_offset, each.source_strides)
            strided_view(target, each.shape, each.target_offset, each.target_strides).copy_(times(block, factor))

    def _factor(self, segment: TransferSegment) -> Fraction:
        return Fraction(segment.scale) ** self.power if segment.scale != 1.0 else Fraction(1)

    def _advance(self, nbytes: int) -> None:
        self.done += nbytes
        if self.progress is not None and nbytes:
            self.progress(self.done, self.schedule.total)


class _Staging:
    """The memory that is held beside the shards: two buffers each way, as large as their largest message so far."""

    def __init__(self, device: torch.device) -> None:
        self.peak = 0
        self._device = device
        self._buffers: dict[tuple[str, int], torch.Tensor] = {}

    def of(self, way: str, slot: int, nbytes: int) -> torch.Tensor:
        """``nbytes`` of that buffer, whose contents are free to be overwritten."""
        key = (way, slot)
        if key not in self._buffers or self._buffers[key].numel() < nbytes:
            # The smaller one goes before the larger one comes.
            self._buffers.pop(key, None)
            self._buffers[key] = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        self.note(0)
        return self._buffers[key][:nbytes]

    def note(self, more: int) -> None:
        """So many bytes are held beside the buffers for a moment."""
        self.peak = max(self.peak, more + sum([each.numel() for each in self._buffers.values()]))


def _packed_as_source(block: TransferSegment) -> TransferSegment:
    """The block as one whose source is the packed elements themselves."""
    return replace(block, source_offset=0, source_strides=row_major_strides(block.shape))
