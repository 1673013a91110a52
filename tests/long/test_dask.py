"""NVTabular fitted by a Dask cluster of two processes: the same features as in this process, and clusters that cannot."""

import socket
import time

import dask.config
import numpy as np
import pandas as pd
import pytest
from distributed import LocalCluster, default_client
from distributed.utils import get_mp_context
from nvtabular import Workflow

from serving.contract.errors import ConfigError, DependencyError
from serving.stages.parts.preprocess import make_tensor
from tests.unit.small_shops import export, shop
from training.dataset import load_dataset
from training.features import FeatureSettings, build_features
from training.features.build import collect_training_columns, take_context
from training.features.cluster import Cluster
from training.features.rows import hold_rows

N_EVENTS, ROWS_PER_FILE = 450, 50  # more files than NVTabular merges at once
TOML = """
name = "lists"
[interactions]
path = "events.csv"
user_id = "customer"
item_id = "sku"
timestamp = "time"
[items]
path = "items.csv"
item_id = "sku"
categorical = ["brand", "shelf"]
multi_categorical = { tags = "|" }
continuous = ["price"]
[users]
path = "users.csv"
user_id = "customer"
categorical = ["plan"]
continuous = ["income"]
[context]
categorical = ["device", "floor"]
continuous = ["temperature"]
"""


@pytest.fixture(scope="module")
def workers(tmp_path_factory):
    """A cluster of two worker processes."""
    folder = tmp_path_factory.mktemp("workers")
    with dask.config.set({"distributed.worker.multiprocessing-method": "forkserver"}):
        get_mp_context().set_forkserver_preload(["distributed", "nvtabular"])  # which a worker imports for four seconds
        with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0", local_directory=folder) as cluster:
            yield cluster


@pytest.fixture
def impatient():
    """Do not wait as long for a scheduler as Dask does by default."""
    with dask.config.set({"distributed.comm.timeouts.connect": "2s"}):
        yield


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """Columns of every kind, each with missing values; the first files have no device, no floor and no temperature."""
    folder, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    late = np.arange(N_EVENTS) >= 3 * ROWS_PER_FILE
    events = pd.DataFrame(
        {
            "customer": rng.integers(0, 40, N_EVENTS),
            "sku": rng.integers(0, 30, N_EVENTS),
            "time": 1_600_000_000 + np.sort(rng.integers(0, 10**6, N_EVENTS)),
            "device": np.where(late & (rng.random(N_EVENTS) < 0.7), rng.choice(["phone", "täblet", "tv"], N_EVENTS), ""),
            "floor": pd.array(rng.integers(0, 12, N_EVENTS)).astype("Int64"),
            "temperature": np.where(late, rng.lognormal(0, 2, N_EVENTS), np.nan),
        }
    )
    events.loc[~late | (rng.random(N_EVENTS) < 0.2), "floor"] = pd.NA
    items = pd.DataFrame({"sku": range(40), "brand": "b" + pd.Series(range(40)).mod(7).astype(str), "price": rng.random(40)})
    items["shelf"] = pd.array(np.arange(40) % 9).astype("Int64")
    items.loc[::4, ["shelf", "price"]] = None
    items["tags"] = [["red|big", "big", "", "red|old|odd", "new"][sku % 5] for sku in range(40)]
    users = pd.DataFrame({"customer": range(45), "plan": ["", "basic", "plus"] * 15, "income": rng.lognormal(8, 1, 45)})
    for name, frame in (("events", events), ("items", items), ("users", users)):
        frame.to_csv(folder / f"{name}.csv", index=False)
    (folder / "dataset.toml").write_text(TOML)
    return load_dataset(folder)


@pytest.mark.parametrize("settings", [FeatureSettings(history_length=8), FeatureSettings(hash_above=8, hash_buckets=11)])
def test_a_cluster_gives_the_features_of_this_process(settings, dataset, workers, tmp_path):
    log, shared = dataset.interactions, tmp_path / "shared"
    shared.mkdir()
    here = build_features(dataset, log, settings, workflow=tmp_path / "here")
    cluster = Cluster(workers.scheduler_address, shared, ROWS_PER_FILE)
    there = build_features(dataset, log, settings, workflow=tmp_path / "there", cluster=cluster)
    assert list(shared.iterdir()) == []
    assert {"describe_stored_column", "categories", "global-moments"} <= workers.scheduler.task_prefixes.keys()

    rows = np.arange(len(log))
    clocks_s = log["timestamp"].to_numpy()
    moments = here.log.find_moments_before(log["user_id"].to_numpy(), clocks_s)
    context = take_context(log, here.context)
    ours, theirs = (features.encode_moments(moments, clocks_s, context) for features in (here, there))
    np.testing.assert_array_equal(theirs.user_categorical, ours.user_categorical)
    np.testing.assert_allclose(theirs.user_continuous, ours.user_continuous, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(there.item_arrays.categorical, here.item_arrays.categorical)
    np.testing.assert_allclose(there.item_arrays.continuous, here.item_arrays.continuous, rtol=1e-5, atol=1e-6)
    for name, lists in here.item_arrays.lists.items():
        np.testing.assert_array_equal(there.item_arrays.lists[name].values, lists.values)
    for our_plan, their_plan in ((here.user_plan, there.user_plan), (here.item_plan, there.item_plan)):
        assert their_plan.categorical == our_plan.categorical
        assert their_plan.lists == our_plan.lists
        for our_number, their_number in zip(our_plan.continuous, their_plan.continuous, strict=True):
            bounds = [(number.fill, number.low, number.high, number.log) for number in (our_number, their_number)]
            assert bounds[0] == bounds[1]
            np.testing.assert_allclose([their_number.mean, their_number.std], [our_number.mean, our_number.std], rtol=1e-5)

    tensors = {
        name: make_tensor(column).ravel()
        for name, column in collect_training_columns(here.log, log, rows, here.schema, here.context).items()
    }
    tensors |= {name: column.astype(str) for name, column in tensors.items() if column.dtype == object}
    ours, theirs = (Workflow.load(tmp_path / name) for name in ("here", "there"))
    expected = ours.transform(pd.DataFrame({name: tensors[name] for name in ours.input_schema.column_names}))
    pd.testing.assert_frame_equal(theirs.transform(pd.DataFrame(tensors)), expected, rtol=1e-5)
    dtypes = [{column.name: column.dtype for column in workflow.output_schema} for workflow in (ours, theirs)]
    assert dtypes[0] == dtypes[1]


def test_files_are_removed_after_a_failure(workers, tmp_path):
    def derive(rows: slice) -> pd.DataFrame:
        if rows.start:
            raise RuntimeError("no more rows")
        return pd.DataFrame({"x": [1.0]})

    with (
        pytest.raises(RuntimeError, match="no more rows"),
        hold_rows(2, derive, Cluster(workers.scheduler_address, tmp_path, rows_per_file=1)),
    ):
        pass
    assert list(tmp_path.iterdir()) == []


def refuse(cluster: Cluster, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message), hold_rows(1, lambda rows: pd.DataFrame({"x": [1.0]}), cluster):
        pass


def test_a_folder_that_cannot_be_written_is_refused(workers, tmp_path):
    refuse(
        Cluster(workers.scheduler_address, tmp_path / "missing"),
        ConfigError,
        r"\[dask\] folder: .*missing cannot be written \(No such",
    )


def test_an_export_whose_scheduler_is_not_there_is_refused(impatient, tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    dataset = shop(tmp_path / "data", users=12, items=30, events=60)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        settings = {"scheduler": f"tcp://127.0.0.1:{free.getsockname()[1]}", "folder": str(shared)}
    with pytest.raises(DependencyError, match="does not answer: Timed out"):
        export(tmp_path, dataset, dask=settings)
    assert list(shared.iterdir()) == []


def test_a_scheduler_without_workers_is_refused(tmp_path):
    with LocalCluster(n_workers=0, processes=False, protocol="tcp://", dashboard_address=":0") as cluster:
        refuse(Cluster(cluster.scheduler_address, tmp_path), DependencyError, "has no worker. Start scheduler and workers")


def test_a_cluster_that_is_lost_is_named(impatient, tmp_path):
    with LocalCluster(n_workers=1, processes=False, protocol="tcp://", dashboard_address=":0") as cluster:

        def derive(rows: slice) -> pd.DataFrame:
            cluster.close()
            return pd.DataFrame({"x": [1.0]})

        with (
            pytest.raises(DependencyError, match="was lost while it fitted"),
            hold_rows(1, derive, Cluster(cluster.scheduler_address, tmp_path)) as rows,
        ):
            rows.describe(["x"])


@pytest.mark.parametrize("is_closed_before_it_fits", [False, True])
def test_a_cluster_whose_workers_do_not_come_back_is_named(is_closed_before_it_fits, monkeypatch, tmp_path):
    """Dask waits for other workers without end."""
    monkeypatch.setattr("training.features.cluster.LONGEST_WITHOUT_WORKERS_S", 1.0)
    with LocalCluster(n_workers=1, processes=False, protocol="tcp://", dashboard_address=":0") as cluster:

        def derive(rows: slice) -> pd.DataFrame:
            client = default_client()
            cluster.scale(0)
            while is_closed_before_it_fits and client.status == "running":
                time.sleep(0.1)
            return pd.DataFrame({"x": [1.0]})

        with (
            pytest.raises(DependencyError, match="was lost while it fitted"),
            hold_rows(1, derive, Cluster(cluster.scheduler_address, tmp_path)) as rows,
        ):
            rows.describe(["x"])
    assert list(tmp_path.iterdir()) == []
