"""Answer requests with a generation's own code, in a process of `make check` that imports nothing of the checkout.

    python -I replay_worker.py REPO GENERATION CODE INPUTS.npz OUTPUTS.npz

CODE is the folder that contains the published `serving/`. When a stage refuses to load, one line on stdout says why, and the
exit code is 3.
"""

import sys
from pathlib import Path

import numpy as np

REFUSED = 3


def main(repository: str, generation: str, code: str, inputs_file: str, outputs_file: str) -> int:
    sys.path.insert(0, code)
    from serving.contract.errors import RecommenderError
    from serving.pipeline import Pipeline

    with np.load(inputs_file, allow_pickle=False) as file:
        inputs = {name: file[name].astype(object) if file[name].dtype.kind == "S" else file[name] for name in file.files}
    try:
        outputs = Pipeline.load(Path(repository), int(generation), as_exported=True)(inputs)
    except RecommenderError as error:
        print(" ".join(str(error).split()))
        return REFUSED
    np.savez(outputs_file, **outputs)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
