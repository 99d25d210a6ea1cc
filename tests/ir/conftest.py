"""Puts the IR's oracle and generators on the path, and fixes the property-test profile so that CI repeats exactly."""

import sys
from pathlib import Path

from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))

settings.register_profile("ir", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ir")
