"""Converts one checkpoint with DeepSpeed's converter and with this one, and compares every file.

    python examples/compare_converters.py CHECKPOINT_FOLDER WORK_FOLDER

The same as ``ds_affine parity``, from Python: for a CI job that keeps a checkpoint of its own training run.
"""

import sys

from deepspeed_affine.commands.parity import ParityOptions, format_table
from deepspeed_affine.parity import run_parity


def main() -> int:
    if len(sys.argv) != 3:
        sys.exit(f"usage: {sys.argv[0]} CHECKPOINT_FOLDER WORK_FOLDER")
    checkpoint, work = sys.argv[1:]
    # A checkpoint without universal_checkpoint_info (any plain ZeRO run) needs it injected, as for ds_to_universal.
    result = run_parity(checkpoint, work, ParityOptions(inject_missing_state=True))
    print(format_table(result))
    return result.exit_code


if __name__ == "__main__":
    sys.exit(main())
