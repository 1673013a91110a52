"""Users whose state is in Redis: every machine's events count once, answers read them, and go on without Redis."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace

import numpy as np
from redis.crc import key_slot

from live.consumer import EventConsumer
from live.erase import erase_user
from live.sharing import Sharer
from serving.contract.tensors import FIRST_USER_ID, NO_SEQUENCE, OBSERVE, UPSERT, Degraded
from serving.live.events import EventBatch
from serving.live.layout import Layout
from serving.live.opening import open_reader
from serving.live.reader import Reader
from serving.live.sequences import hash_machine, mark_sequences, unpack_sequence
from serving.live.shared.feast_layout import make_entity_key
from serving.live.shared.feast_views import ITEMS_VIEW, USERS_VIEW
from serving.live.shared.redis_reader import RedisReader
from serving.live.shared.redis_state import PATIENT_S, RedisState
from serving.live.store import find_live_folder
from serving.live.writer import Writer
from serving.pipeline import Pipeline
from serving.stages.live.models import Observe, Upsert
from tests.interrupting import called_on_return
from tests.unit.live.answers import answer, change_stage, event_inputs, upserted
from tests.unit.live.batches import START_MS, events, purchase
from tests.unit.live.consuming import consumer_of, make_message
from tests.unit.live.learned import Generation
from tests.unit.live.redis.redis_machines import IDLE_DAYS, PROJECT, SESSION_HOURS, Machine, count_events, machine
from tests.unit.live.twin import StateTwin, list_user_differences
from tests.unit.tables.redis_server import RedisCluster


def differing(reader: RedisReader, batch: EventBatch) -> list[str]:
    """Return where the shared state is not what the twin says of these events."""
    twin = StateTwin()
    twin.apply(batch)
    with reader.users.snapshot() as snapshot:
        return list_user_differences(twin, snapshot, Layout())


def item_counts(state: RedisState, n_items: int) -> list[int]:
    entities = state.read(ITEMS_VIEW, np.arange(n_items))
    return [entity.values.get("event_count", 0) for entity in entities]


def at_distinct_moments(batch: EventBatch, start: int) -> EventBatch:
    """Two machines do not agree on the order of events of the same moment."""
    batch.headers["time_ms"] = START_MS + 1_000 * (start + np.random.default_rng(start).permutation(len(batch)))
    return batch


def test_machines_that_share_apply_every_event_once(tmp_path, state, redis):
    rng = np.random.default_rng(0)
    batches = [at_distinct_moments(events(rng, 300), 1_000 * number) for number in range(4)]
    everything = EventBatch.join(batches)
    with machine(tmp_path / "a", redis.address) as one, machine(tmp_path / "b", redis.address) as other:
        for turn in range(2):
            for number, host in enumerate((one, other)):
                host.writer.append(batches[2 * turn + number])
            with ThreadPoolExecutor(2) as pool:  # at the same moment
                list(pool.map(Machine.share_all, (one, other)))
        for host in (one, other):
            assert differing(host.reader, everything) == []
        counts = np.bincount(everything.headers["item_id"], minlength=30).tolist()
        assert item_counts(state, 30) == counts
        one.sharer.share(0)  # a process that died before it noted its place
        one.share_all()
        assert differing(other.reader, everything) == []
        assert item_counts(state, 30) == counts
        progress = [host.writer.store.read_progress() for host in (one, other)]
        with one.reader.users.snapshot() as snapshot:
            assert snapshot.read_progress().watermark_ms == max(own.watermark_ms for own in progress)
            assert snapshot.read_progress().last_sequence == progress[0].last_sequence
        (key, *_) = redis.client.keys(b"*user_id*")
        assert 0 < redis.client.ttl(key) <= IDLE_DAYS * 86_400
        redis.client.flushall()
        for host in (one, other):
            host.share_all()
        assert differing(one.reader, everything) == []


def test_users_are_read_and_written_while_their_slot_moves_to_another_node(tmp_path):
    cluster, key = RedisCluster(tmp_path / "redis", n_nodes=2), make_entity_key(PROJECT, USERS_VIEW.join_key, 1)
    slot = key_slot(key)
    with (
        closing(RedisState(cluster.address, PROJECT, PATIENT_S)) as state,
        machine(tmp_path / "a", cluster.address) as host,
    ):
        host.buy((1, 0))
        source, target = sorted(cluster.nodes, key=lambda node: -node.client.execute_command("CLUSTER COUNTKEYSINSLOT", slot))
        source_id, target_id = (node.client.execute_command("CLUSTER MYID") for node in (source, target))
        target.client.execute_command("CLUSTER SETSLOT", slot, "IMPORTING", source_id)
        source.client.execute_command("CLUSTER SETSLOT", slot, "MIGRATING", target_id)
        source.client.migrate("127.0.0.1", target.port, key, 0, 10_000)
        assert count_events(state, 1) == 1
        host.buy((1, 1))
        for node in (target, source):
            node.client.execute_command("CLUSTER SETSLOT", slot, "NODE", target_id)
        host.buy((1, 2))
        assert count_events(state, 1) == 3
    cluster.stop()


def test_the_hash_of_an_anonymous_session_expires_sooner_than_that_of_a_user(tmp_path, state, redis):
    session = FIRST_USER_ID - 5
    with machine(tmp_path / "a", redis.address) as one:
        for user in (session, 1):
            one.writer.append(purchase(user, item=3))
        one.share_all()
    session_s, user_s = (redis.client.ttl(make_entity_key(PROJECT, "user_id", user)) for user in (session, 1))
    assert 0 < session_s <= SESSION_HOURS * 3_600 < user_s <= IDLE_DAYS * 86_400


def test_a_sequence_is_waited_for_in_the_log_of_the_machine_that_gave_it(tmp_path, state, redis):
    with machine(tmp_path / "a", redis.address) as one, machine(tmp_path / "b", redis.address) as other:
        for host, count in ((one, 1), (other, 3)):
            for item in range(count):
                host.writer.append(purchase(1, item))
        mine, theirs = (
            mark_sequences(np.array(places), host.sharer.machine, shared=True)
            for host, places in ((one, [1, 2]), (other, [1, 3]))
        )
        changed = [
            mark_sequences(np.array([1]), host.sharer.machine, shared=False) for host in (one, other)
        ]  # by `upsert`, which is not shared
        asked = np.concatenate([mine, theirs, *changed, [NO_SEQUENCE, 1]])
        assert (asked[:-2] > 0).all()
        one.share_all()
        answered = one.reader.users.wait_for(asked, timeout_s=0.01)
        assert answered.tolist() == [True, False, False, False, True, False, True, True]
        other.share_all()
        answered = one.reader.users.wait_for(asked, timeout_s=0.01)
        assert answered.tolist() == [True, False, True, True, True, False, True, True]
        unknown = mark_sequences(np.array([1]), "a machine that is gone", shared=True)
        assert one.reader.users.wait_for(unknown, timeout_s=0.01).tolist() == [False]
        impossible = mark_sequences(np.array([1, 2**37]), one.sharer.machine, shared=True)
        begun_s = time.monotonic()
        assert one.reader.users.wait_for(impossible, timeout_s=60.0).tolist() == [True, False]
        assert time.monotonic() - begun_s < 30


def test_models_that_share_users_mark_their_sequences(repository, redis):
    for name in (OBSERVE, UPSERT):
        change_stage(repository, name, live_redis=redis.address, live_project=PROJECT)
    with (
        closing(Observe.load(repository / OBSERVE / "1")) as observe,
        closing(Upsert.load(repository / UPSERT / "1")) as upsert,
    ):
        event = unpack_sequence(int(observe(event_inputs(user_id=[8], item_id=[1]))["sequence"][0, 0]))
        change = unpack_sequence(upserted(upsert, 1, title="new"))
        assert (event.shared, change.shared, event.place, change.place) == (True, False, 1, 2)
        assert event.machine == change.machine == hash_machine(observe.writer.name_machine())


def test_an_event_from_kafka_that_all_machines_read_counts_once(tmp_path, state, redis):
    messages = [make_message(b'{"user_id": 1, "item_id": %d}' % number, number) for number in range(5)]
    with machine(tmp_path / "a", redis.address) as one, machine(tmp_path / "b", redis.address) as other:
        for host in (one, other):
            consumer: EventConsumer = consumer_of(host.writer)
            consumer.append_messages(messages)
            host.buy((1, 50))
        (entity,) = state.read(USERS_VIEW, np.array([1]))
        assert entity.values["event_count"] == 7
        assert entity.values["seen_ids"] == [0, 1, 2, 3, 4, 50]


def test_what_feast_writes_meanwhile_is_not_overwritten(tmp_path, state, redis):
    view = USERS_VIEW
    key = make_entity_key(PROJECT, view.join_key, 1)

    def write_as_feast() -> None:
        if not redis.client.exists(key):
            redis.client.hset(key, mapping=dict(view.encode(FROM_FEAST)) | {view.time_field: b"\x08\x01"})

    with machine(tmp_path / "a", redis.address) as host:
        host.writer.append(purchase(1, 7))
        with called_on_return(write_as_feast, RedisState.read):
            host.share_all()
        (entity,) = state.read(view, np.array([1]))
        assert entity.values["event_count"] == 11
        assert entity.values["history_ids"] == [7, 3]


FROM_FEAST: dict[str, int | float | list] = {
    "history_ids": [3],
    "history_s": [100],
    "session_ids": [],
    "session_ms": [],
    "session_values": [],
    "session_events": [],
    "event_count": 10,
    "sum_weight": 10.0,
    "sum_label": 0.0,
    "first_ms": 1_000,
    "last_ms": 100_000,
    "received_ms": 100_000,
    "seen_ids": [3],
}


def test_a_cluster_of_several_nodes_holds_the_state(tmp_path):
    cluster = RedisCluster(tmp_path / "redis")
    batch = at_distinct_moments(events(np.random.default_rng(1), 100), 0)
    with machine(tmp_path / "a", cluster.address) as host:
        host.writer.append(batch)
        host.share_all()
        assert differing(host.reader, batch) == []
    assert all(node.client.dbsize() for node in cluster.nodes)
    cluster.stop()


def test_answers_of_one_machine_know_the_events_of_another_and_go_on_without_redis(repository, tmp_path, redis, state):
    own = find_live_folder(repository)
    with (
        closing(Observe.load(repository / OBSERVE / "1")) as alone,
        machine(tmp_path / "other", redis.address) as other,
        closing(open_reader(repository, replace(alone.info, live_redis=redis.address, live_project=PROJECT))) as reader,
        closing(Reader(own)) as local,
    ):
        observe = replace(alone, info=replace(alone.info, live_redis=redis.address, live_project=PROJECT))
        pipeline = Pipeline.load(repository, live=reader)
        before = answer(pipeline, [7])
        assert before["degraded"].tolist() == [[0]]
        bought = int(before["item_ids"][0, 0])
        other.writer.append(purchase(7, bought, observe.now_ms()))
        other.share_all()
        after = answer(pipeline, [7])
        assert bought not in after["item_ids"][0]
        sharer = Sharer(observe.writer, state, IDLE_DAYS, SESSION_HOURS)
        sequence = int(observe(event_inputs(user_id=[8], item_id=[bought]))["sequence"][0, 0])
        late = answer(pipeline, [8], after=[sequence])
        assert late["degraded"].tolist() == [[int(Degraded.LIVE)]]
        sharer.share(sharer.begin())
        in_time = answer(pipeline, [8], after=[sequence])
        assert in_time["degraded"].tolist() == [[0]]
        assert bought not in in_time["item_ids"][0]
        local_answer = answer(Pipeline.load(repository, live=local), [8])
        assert local_answer["item_ids"].tolist() == in_time["item_ids"].tolist()
    away = RedisState("127.0.0.1:1", PROJECT)
    with closing(Observe.load(repository / OBSERVE / "1")), closing(RedisReader(own, "", away)) as reader:
        degraded = answer(Pipeline.load(repository, live=reader), [7, 8])
        assert degraded["degraded"].tolist() == [[int(Degraded.LIVE)]] * 2
        assert (degraded["item_ids"][:, 0] >= 0).all()


def test_a_new_event_is_added_to_what_a_later_generation_learned(tmp_path, state, redis, clock):
    start_s, day_ms = START_MS // 1_000, 86_400_000
    learned = Generation([(99, start_s + 5), (2, start_s + 1), (1, start_s)])

    def read(user: int) -> tuple[object, ...]:
        """Return the number of events, the history and the seen items."""
        (entity,) = state.read(USERS_VIEW, np.array([user]))
        return tuple(entity.values.get(name) for name in ("event_count", "history_ids", "seen_ids"))

    def buy(writer: Writer, item: int, second: int, *users: int) -> None:
        for user in users:
            writer.append(purchase(user, item, 1_000 * (start_s + second)))

    with machine(tmp_path / "a", redis.address, now_ms=clock) as host:
        writer = host.writer
        buy(writer, 1, 0, 7, 8, 9)
        buy(writer, 2, 1, 7, 8, 9)
        erase_user(writer, 9)
        host.share_all()
        writer.seeds = learned
        buy(writer, 3, 20, 7)  # the visit goes on
        host.share_all()
        assert read(7) == (3, [3, 2, 1], [1, 2, 3])
        clock.ms += day_ms
        buy(writer, 4, 3, 8)  # earlier than what the generation knows, which may have learned it
        host.share_all()
        assert read(8) == (3, [4, 2, 1], [1, 2, 4])
        clock.ms += day_ms
        writer.seeds = Generation([(99, start_s + 5), (4, start_s + 3), (2, start_s + 1), (1, start_s)])
        buy(writer, 5, 30, 8, 9)
        host.share_all()
        expected = (5, [5, 99, 4, 2, 1], [1, 2, 4, 5])
        assert read(8) == expected
        assert read(9) == (1, [5], [5])  # who was erased begins from nothing
        redis.client.flushall()
        host.share_all()  # the whole log again
        assert read(8) == expected


def test_an_answer_uses_what_a_later_generation_learned_of_a_user(repository, tmp_path, redis, state):
    with (
        closing(Observe.load(repository / OBSERVE / "1")) as observe,
        closing(open_reader(repository, replace(observe.info, live_redis=redis.address, live_project=PROJECT))) as reader,
    ):
        pipeline = Pipeline.load(repository, live=reader)

        def read_history(user: int) -> list[int]:
            return [item for item in pipeline.trace({"user_id": np.array([[user]])})["history_ids"][0].tolist() if item >= 0]

        learned = read_history(1)
        assert len(learned) > 1
        now_ms, view = observe.now_ms(), USERS_VIEW
        old = FROM_FEAST | {"history_ids": learned[-1:], "event_count": 1, "last_ms": 1_000}
        key = make_entity_key(PROJECT, view.join_key, 1)
        for received_ms, history_ids, expected in (
            (now_ms - 86_400_000, [45], [45]),  # of which the generation does not know
            (now_ms, learned[-1:], learned[-1:]),  # the visit goes on
            (0, learned[-1:], learned[-1:]),  # Feast wrote it, and need not say when an event arrived
            (now_ms - 86_400_000, learned[-1:], learned),
        ):
            known = read_known(observe, 1)
            times = [known.get(item, 100) for item in history_ids]
            hashed = old | {"received_ms": received_ms, "history_ids": history_ids, "history_s": times}
            redis.client.hset(key, mapping=dict(view.encode(hashed)) | {view.time_field: b"\x08\x01"})
            assert read_history(1) == expected


def read_known(observe: Observe, user: int) -> dict[int, int]:
    """Return the items of a user's history in the generation, and when they were bought."""
    assert observe.writer.seeds
    (record,) = observe.writer.seeds.make_first_records(np.array([user]), observe.writer.layout)
    return dict(zip(record["history_ids"].tolist(), record["history_s"].tolist(), strict=True))
