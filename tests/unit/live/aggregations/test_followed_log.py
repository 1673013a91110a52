"""The end of the bundled log, posted as live events: the followed records give the features of training."""

from contextlib import closing

import numpy as np
import pytest

from export.live import make_event_kinds
from export.prequential import event_inputs
from serving.live.admission import EventAdmission
from serving.live.aggregations import Instants, parse_aggregations
from serving.live.layout import Layout
from serving.live.reader import Reader
from serving.live.writer import Writer
from serving.stages.features.ids import ItemIndex
from serving.stages.live.trends import ItemTrends
from tests.unit.live.aggregations.test_bundled_log import MORE
from training.dataset import load_dataset
from training.features.aggregates import DEFAULTS, LogAggregates
from training.features.trends import write_trends

ENTITIES = ("item", "category")
N_INSTANTS = 1_000
N_LIVE = 10_000  # events after the export
COUNTS = ("sales_1h", "sales_24h", "sales_7d", "buyers_7d", "category_24h")


@pytest.fixture(scope="module")
def dataset():
    return load_dataset("online-retail")


@pytest.fixture(scope="module")
def features(dataset, tmp_path_factory):
    """Return followed and expected features float32 [N_INSTANTS, F] by entity, and the names of the features by entity."""
    folder, log = tmp_path_factory.mktemp("rank"), dataset.interactions
    times_s = log["timestamp"].to_numpy()
    first = int(np.searchsorted(times_s, times_s[-N_LIVE]))
    declared = parse_aggregations((*DEFAULTS, *MORE), ["category"], dataset.description.event_names)
    declared = tuple(aggregation for aggregation in declared if aggregation.entity in ENTITIES)
    write_trends(folder, dataset, LogAggregates.of(dataset, log.iloc[:first], declared), 0)
    whole = LogAggregates.of(dataset, log, declared)
    items, n_numbers = ItemIndex(whole.item_ids[:-1]), len(whole.item_names)
    trends = ItemTrends.load(folder, items, np.zeros((items.n_items + 1, n_numbers), np.float32), int(times_s[first - 1]))
    assert trends is not None
    rows = np.sort(np.random.default_rng(0).choice(np.arange(first, len(log)), N_INSTANTS, replace=False))
    positions = items.positions(log["item_id"].to_numpy()[rows])
    followed: dict[str, list[np.ndarray]] = {entity.plan.entity: [] for entity in trends.entities}
    kinds, start = make_event_kinds(dataset.description), first
    admission = EventAdmission(kinds)
    with closing(Writer(folder / "live", Layout(), kinds.names)) as writer, closing(Reader(folder / "live")) as reader:
        for row, position in zip(rows.tolist(), positions, strict=True):
            if row > start:
                writer.append(admission.events(event_inputs(dataset, np.arange(start, row)), writer.codes, writer.now_ms()))
                with reader.snapshot() as snapshot:
                    read = trends.read_sequence
                    trends.follow(snapshot, snapshot.progress(), snapshot.headers_since(read), read)
            start = row
            for entity in trends.entities:
                followed[entity.plan.entity].append(entity.read(position[None], 1_000 * int(times_s[row]))[0])
    instants = {
        entity: whole.compute_at(entity, Instants(whole.keys[entity][rows], 1_000 * times_s[rows], rows)) for entity in followed
    }
    names = {entity.plan.entity: entity.plan.names for entity in trends.entities}
    return {entity: np.stack(values) for entity, values in followed.items()}, instants, names


@pytest.mark.parametrize("entity", ENTITIES)
def test_followed_records_give_the_features_of_training(features, entity):
    followed, expected, names = (part[entity] for part in features)
    counts = [name in COUNTS for name in names]
    np.testing.assert_array_equal(followed[:, counts], expected[:, counts])
    np.testing.assert_allclose(followed, expected, rtol=1e-6)
    assert (np.nanstd(expected, axis=0) > 0).all()
