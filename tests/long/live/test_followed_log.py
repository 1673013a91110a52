"""The end of the bundled log, posted as live events: the followed records give the features of training."""

from contextlib import closing

import numpy as np
import pytest

from export.continuous.prequential import make_event_inputs
from export.steps.live import make_event_kinds
from serving.live.admission import EventAdmission
from serving.live.aggregations import Instants, make_entity_keys, parse_aggregations
from serving.live.aggregations.plan import NO_KEY
from serving.live.aggregations.spec import USER
from serving.live.layout import Layout
from serving.live.reader import Reader
from serving.live.writer import Writer
from serving.stages.features.ids import ItemIndex
from serving.stages.features.user_store import StoredAggregates
from serving.stages.live.counts.counted_events import CountedEvents
from serving.stages.live.counts.trends import ItemTrends
from serving.stages.live.users.user_categories import UserCategoryTrends
from serving.stages.live.users.user_trends import UserTrends
from tests.long.live.aggregations.declared import DECLARED
from tests.present import present
from training.dataset import load_dataset
from training.features.aggregates import LogAggregates, name_all
from training.features.trends import write_trends

WITHIN = "user x category"
ENTITIES = (USER, "item", "category", WITHIN)
N_INSTANTS = 400
N_LIVE = 4_000  # events after the export
COUNTS = ("session_events", "events_7d", "sales_1h", "sales_24h", "sales_7d", "buyers_7d", "category_24h", "own_category_7d")


@pytest.fixture(scope="module")
def dataset():
    return load_dataset("online-retail")


@pytest.fixture(scope="module")
def features(dataset, tmp_path_factory):
    """Return followed and expected features float32 [N_INSTANTS, F] by entity, and the names of the features by entity."""
    folder, log = tmp_path_factory.mktemp("rank"), dataset.interactions
    times_s = log["timestamp"].to_numpy()
    first = int(np.searchsorted(times_s, times_s[-N_LIVE]))
    as_of_s = int(times_s[first - 1])
    declared = parse_aggregations(DECLARED, ["category"], dataset.description.event_names)
    known, whole = (LogAggregates.of(dataset, part, declared) for part in (log.iloc[:first], log))
    write_trends(folder, dataset, known, 0)
    items = ItemIndex(whole.item_ids[:-1])
    n_numbers = [len(name_all(plans)) for plans in (whole.item_plans, whole.pair_plans)]
    trends = present(ItemTrends.load(folder, items, np.zeros((items.n_items + 1, n_numbers[0]), np.float32), as_of_s))
    within = present(UserCategoryTrends.load(folder, items, sum(n_numbers), as_of_s))
    user_ids = np.unique(log["user_id"].to_numpy()[:first])
    rows = np.sort(np.random.default_rng(0).choice(np.arange(first, len(log)), N_INSTANTS, replace=False))
    users, positions = log["user_id"].to_numpy()[rows], items.find_positions(log["item_id"].to_numpy()[rows])
    assert not np.isin(users, user_ids).all()  # some are new
    followed: dict[str, list[np.ndarray]] = {entity: [] for entity in ENTITIES}
    kinds, start = make_event_kinds(dataset.description), first
    admission = EventAdmission(kinds)
    with closing(Writer(folder / "live", Layout(), kinds.names)) as writer, closing(Reader(folder / "live")) as reader:
        of_users = UserTrends(reader, user_ids, store_users(known, user_ids), count_events(known, items, as_of_s))
        for row, user, position in zip(rows.tolist(), users, positions, strict=True):
            if row > start:
                writer.append(
                    admission.make_events(make_event_inputs(dataset, np.arange(start, row)), writer.codes, writer.now_ms())
                )
                with reader.snapshot() as snapshot:
                    read = trends.counted.read_sequence
                    for each in (trends, within):
                        each.follow(snapshot, snapshot.read_progress(), snapshot.read_headers_since(read), read)
                assert of_users.refresh()
            start = row
            for entity in trends.entities:
                followed[entity.plan.entity].append(entity.read(position[None], 1_000 * int(times_s[row]))[0])
            followed[USER].append(of_users.read(user[None], int(times_s[row]))[0])
            (own,) = within.entities
            followed[WITHIN].append(own.read(user[None], position[None, None], 1_000 * int(times_s[row]))[0, 0])
    instants = {
        entity: whole.compute_at(entity, Instants(whole.keys[entity][rows], 1_000 * times_s[rows], rows)) for entity in ENTITIES
    }
    names = {entity: plan.names for entity, plan in whole.plans.items()}
    return {entity: np.stack(values) for entity, values in followed.items()}, instants, names


def store_users(aggregates: LogAggregates, user_ids: np.ndarray) -> StoredAggregates:
    known_ids = np.append(user_ids, NO_KEY)
    records = aggregates.make_records(USER, make_entity_keys(USER, known_ids, known_ids, {}))
    prices = None if aggregates.prices is None else aggregates.prices.astype(np.float32)
    return StoredAggregates(aggregates.plans[USER], records, aggregates.event_names, aggregates.amount, prices)


def count_events(aggregates: LogAggregates, items: ItemIndex, as_of_s: int) -> CountedEvents:
    return CountedEvents(items, as_of_s, aggregates.event_names, aggregates.amount, aggregates.prices)


@pytest.mark.parametrize("entity", ENTITIES)
def test_followed_records_give_the_features_of_training(features, entity):
    followed, expected, names = (part[entity] for part in features)
    counts = [name in COUNTS for name in names]
    np.testing.assert_array_equal(followed[:, counts], expected[:, counts])
    np.testing.assert_allclose(followed, expected, rtol=1e-6)
    assert (np.nanstd(expected, axis=0) > 0).all()
