"""The hardened baseline in a real server: NVTabular in the path, each node once, answers as in one process."""

import numpy as np
import tritonclient.grpc as grpcclient

from perf.load.workload import ask
from training.dataset import load_dataset


def test_hardened_baseline_serves(launch, tmp_path):
    from merlin.dag.runtime import Runtime
    from merlin.table import TensorTable

    from experiments.merlin import HARDENED, make_baseline_spec  # it imports NVTabular, which takes each worker seconds
    from experiments.merlin_graph import VARIANTS, Parts, export_variant, new_ensemble, read_sides

    users, items = read_sides(load_dataset("synthetic:tiny"))
    parts = Parts.make(tmp_path / "parts", users, items, 15, np.random.default_rng(0))
    variant = next(variant for variant in VARIANTS if variant.name == HARDENED)
    export_variant(parts, variant, tmp_path / "repository")
    ensemble = new_ensemble(parts, nvtabular=True)
    server = launch(tmp_path / "repository", ready_timeout_s=200.0)
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        for user_id in users.frame["user_id"].iloc[[0, -1]]:
            served = ask(client, make_baseline_spec(), "", {"user_id": np.array([user_id])})
            expected = ensemble.transform(TensorTable({"user_id": np.array([user_id])}), runtime=Runtime())
            np.testing.assert_array_equal(served["item_ids"], expected["item_ids"].values)
            np.testing.assert_allclose(served["scores"], expected["scores"].values, rtol=1e-6)
