"""Convert, verify and move DeepSpeed checkpoints through an affine description of every shard."""

from deepspeed_affine._version import __version__

__all__ = ["__version__"]
