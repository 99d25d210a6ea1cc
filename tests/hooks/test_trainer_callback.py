"""The callback of ``examples/hf_trainer.py`` follows the engines its Trainer makes."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import engines
import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "hf_trainer.py"


@pytest.fixture(scope="module")
def example():
    pytest.importorskip("transformers")
    spec = importlib.util.spec_from_file_location("hf_trainer", EXAMPLE)
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def test_a_run_that_starts_again_is_attached_to_its_new_engine(example):
    accelerator = SimpleNamespace(prepare=lambda *objects: objects if len(objects) > 1 else objects[0])
    callback = example.AffineCallback(SimpleNamespace(accelerator=accelerator))
    first = engines.make_engine(1)
    assert accelerator.prepare(first, "scheduler") == (first, "scheduler")
    handle = callback.handle
    assert handle.attached
    assert handle.engine is first
    # The first run broke off: it has seen no on_train_end.
    second = engines.make_engine(1, model=first.module)
    assert accelerator.prepare(second) is second
    assert not handle.attached
    assert callback.handle.attached
    assert callback.handle.engine is second
    assert second.module.universal_checkpoint_info["affine_map"]
    callback.on_train_end(None, None, None)
    assert callback.handle is None
    assert not hasattr(second.module, "universal_checkpoint_info")
