"""The Python client (`triton_recommender`, installable alone) and its entry point in a checkout: `python -m clients`.

Importing `clients` puts this folder on the path, so that `import triton_recommender` works where nothing was installed.
"""

import sys
from pathlib import Path

FOLDER = str(Path(__file__).resolve().parent)
if FOLDER not in sys.path:
    sys.path.append(FOLDER)
