"""Attributes set on single objects come off again without a trace; nothing shared is ever set."""

from __future__ import annotations

import types

import pytest
import torch

from deepspeed_affine.hooks.instances import Instances


class Owner:
    kept = "of the class"


@pytest.mark.parametrize(
    "shared", [Owner, types, Instances.put, lambda: None], ids=["class", "module", "def", "lambda"]
)
def test_what_others_share_is_refused(shared):
    before = dict(vars(shared))
    with pytest.raises(TypeError, match="which others share"):
        Instances().put(shared, "kept", "ours")
    assert dict(vars(shared)) == before


@pytest.mark.parametrize("make", [Owner, torch.nn.Linear(2, 2).cpu, lambda: torch.nn.Parameter(torch.zeros(3))])
def test_restoring_leaves_the_same_attributes(make):
    owner, instances = make(), Instances()
    vars(owner)["present"] = before = object()
    attributes = dict(vars(owner))
    instances.put(owner, "present", 1)
    instances.put(owner, "absent", 2)
    instances.put(owner, "present", 3)
    assert (owner.present, owner.absent) == (3, 2)
    instances.restore()
    assert owner.present is before
    assert list(vars(owner).items()) == list(attributes.items())
    instances.restore()
    assert dict(vars(owner)) == attributes


def test_a_class_shows_through_again():
    owner, instances = Owner(), Instances()
    instances.put(owner, "kept", "ours")
    assert (owner.kept, Owner.kept) == ("ours", "of the class")
    instances.restore()
    assert owner.kept == "of the class"
    assert vars(owner) == {}


def test_what_somebody_else_has_set_since_stays():
    owner, instances = Owner(), Instances()
    instances.put(owner, "mine", 1)
    owner.mine = theirs = object()
    instances.restore()
    assert owner.mine is theirs
