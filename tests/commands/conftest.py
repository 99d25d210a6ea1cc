"""Makes the shared helper modules importable under pytest's importlib mode, and their fixtures known."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from stores import memory, no_waiting, s3, s3_server, store

__all__ = ["memory", "no_waiting", "s3", "s3_server", "store"]
