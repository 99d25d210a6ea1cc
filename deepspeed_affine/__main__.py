"""``python -m deepspeed_affine``: both commands by the module's name, for launchers that start modules."""

import sys

from deepspeed_affine.cli import VERBS, ds_affine, ds_to_universal

if __name__ == "__main__":
    sys.exit(ds_affine() if sys.argv[1:2] and sys.argv[1] in VERBS else ds_to_universal())
