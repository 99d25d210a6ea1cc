"""``attach``: one live engine saves how its parameters are cut, and loads universal checkpoints by its own maps."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any

from deepspeed_affine.errors import AffineError, PolicyError
from deepspeed_affine.hooks.client_state import ATTRIBUTE, HANDLE, saves_attribute, stated_info, universal_info
from deepspeed_affine.hooks.given import require_engine, require_info
from deepspeed_affine.hooks.guarded_load import bind_guard
from deepspeed_affine.hooks.instances import Instances
from deepspeed_affine.hooks.layouts import described
from deepspeed_affine.hooks.restoring import Restorer
from deepspeed_affine.lowering.policy import ScaledStates

if TYPE_CHECKING:
    from deepspeed_affine.hooks.layouts import LiveParam

__all__ = ["Attachment", "attach"]


@dataclass(eq=False, frozen=True, slots=True, repr=False)
class Attachment:
    """What ``attach`` did to one engine. ``detach()``, or leaving it as a context manager, undoes all of it.

    ``params`` are the engine's parameters with their maps, ``refused`` those that no map describes, each with the
    reason: loading raises it. ``info`` is what the engine's checkpoints say of them.
    ``emits`` is False where the installed DeepSpeed does not read the module's attribute when it saves; then pass
    ``client_state=with_universal_info(client_state, engine)`` to ``save_checkpoint``.
    """

    engine: Any
    params: Mapping[str, LiveParam]
    refused: Mapping[str, AffineError]
    info: Mapping[str, Any]
    emits: bool
    own: Mapping[str, Any]
    _instances: Instances

    def __repr__(self) -> str:
        where = "to" if self.attached else "no longer to"
        refused = f", {len(self.refused)} refused" if self.refused else ""
        return f"<Attachment {where} a {type(self.engine).__name__}, {len(self.params)} parameters{refused}>"

    @property
    def attached(self) -> bool:
        return vars(self.engine).get(HANDLE) is self

    def say(self, info: Mapping[str, Any]) -> None:
        """The engine's checkpoints say ``info`` of its parameters from here on, until ``detach``."""
        self._instances.put(self.engine.module, ATTRIBUTE, dict(info))

    def detach(self) -> None:
        """The engine, its module, its optimizer and its parameters are as they were. A second call does nothing."""
        if self.attached:
            self._instances.restore()

    def __enter__(self) -> Attachment:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach()


def attach(engine: Any, *, info: Mapping[str, Any] | None = None, scaled_states: str = "refuse") -> Attachment:
    """``engine`` saves the map of every parameter, and its ``load_checkpoint`` restores universal checkpoints by them.

    Call it on every rank after ``deepspeed.initialize``. ``info`` is the ``universal_checkpoint_info`` of a model whose
    layers were cut by hand. ``scaled_states`` says what becomes of optimizer states of a parameter held scaled:
    "refuse", "reset" (zeros) or "power". Only attributes of this engine, its module, its optimizer and its parameters
    are set, none of any class or module. An engine that is attached already is refused.
    """
    require_engine(engine, "attach")
    require_info(info, "attach")
    policy = _policy(scaled_states)
    if HANDLE in vars(engine):
        raise PolicyError(
            "The engine is attached already; expected one that is not. Call detach() on the handle the first attach "
            "returned, then attach again."
        )
    own = MappingProxyType(dict(info or {}))
    params, refused = described(engine.module, info=stated_info(engine, own) or None, mpu=engine.mpu)
    made = universal_info(engine, own)
    instances = Instances()
    handle = Attachment(
        engine, MappingProxyType(params), MappingProxyType(refused), made, saves_attribute(engine), own, instances
    )
    try:
        instances.put(engine, HANDLE, handle)
        instances.put(engine.module, ATTRIBUTE, dict(made))
        if engine.optimizer is not None:
            restorer = Restorer(engine, params, refused, policy)
            restorer.bind(instances)
            bind_guard(engine, restorer, instances)
    except BaseException:
        instances.restore()
        raise
    if not handle.emits and engine.global_rank == 0:
        from deepspeed import __version__

        warnings.warn(
            f"DeepSpeed {__version__} does not read the module's {ATTRIBUTE} when it saves this model: attaching "
            "covers loading only. Pass client_state=deepspeed_affine.with_universal_info(client_state, engine) to "
            "save_checkpoint.",
            stacklevel=2,
        )
    if refused and engine.global_rank == 0:
        first = next(iter(refused.values()))
        warnings.warn(
            f"{len(refused)} of the engine's parameters can be described by no map: loading them will be refused, and "
            f"so will converting what is saved. {first.message}",
            stacklevel=2,
        )
    return handle


def _policy(scaled_states: str) -> ScaledStates:
    try:
        return ScaledStates(scaled_states)
    except ValueError:
        raise PolicyError(
            f"scaled_states is {scaled_states!r}; expected one of {[policy.value for policy in ScaledStates]}."
        ) from None
