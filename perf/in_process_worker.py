"""One process of the in-process baseline: `serving/pipeline.py` of a published repository, called with recorded requests.

    python -P perf/in_process_worker.py REPO GENERATION ROWS.npz

Each line on stdin, {"batch": B, "seconds": s, "pause_s": p}, is answered by a line {"rows": …, "seconds": …, "latency_ns": […]}
on stdout. The code is the one published with the artifacts, so two repositories compare as they would be served.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np


def main(repo: Path, generation: int, rows_file: str) -> None:
    sys.path.insert(0, str(repo / "recommend" / str(generation)))
    from serving.pipeline import Pipeline

    pipeline = Pipeline.load(repo, generation)
    with np.load(rows_file, allow_pickle=False) as file:
        rows = {name: file[name].astype(object) if file[name].dtype.kind == "S" else file[name] for name in file.files}
    print(json.dumps({"ready": len(rows["user_id"])}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(measure(pipeline, rows, **request)), flush=True)


def measure(pipeline, rows: dict[str, np.ndarray], batch: int, seconds: float, pause_s: float) -> dict:
    """Answer whole batches one after another, `pause_s` apart, until `seconds` have passed."""
    count = len(rows["user_id"]) // batch
    batches = [{name: array[i * batch : (i + 1) * batch] for name, array in rows.items()} for i in range(count)]
    for inputs in batches[:5]:
        pipeline(inputs)
    latency_ns: list[int] = []
    start_ns = time.perf_counter_ns()
    end_ns = start_ns + int(seconds * 1e9)
    now_ns = start_ns
    while now_ns < end_ns:
        if pause_s:
            time.sleep(pause_s)
            now_ns = time.perf_counter_ns()
        pipeline(batches[len(latency_ns) % count])
        before_ns, now_ns = now_ns, time.perf_counter_ns()
        latency_ns.append(now_ns - before_ns)
    return {"rows": len(latency_ns) * batch, "seconds": (now_ns - start_ns) / 1e9, "latency_ns": latency_ns}


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
