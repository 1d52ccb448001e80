"""The examples are imported as a user does: from their own folder."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3] / "examples"))
