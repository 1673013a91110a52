"""Server statistics and hit rates, from what a real server answered (samples/) and from small cases with known answers."""

import copy
import json
import socket
import threading
from pathlib import Path

import pytest

from perf.observe import (
    PeakMemory,
    ProcessMemory,
    compute_hit_rates,
    compute_times,
    parse_metrics,
    parse_statistics,
    read_samples,
    read_times_since,
    sum_mib,
)

STATISTICS = json.loads((Path(__file__).parent / "samples" / "statistics.json").read_text())


def test_a_servers_counters_are_read():
    rank = parse_statistics(STATISTICS)["rank"]
    stated = next(model for model in STATISTICS["model_stats"] if model["name"] == "rank")
    assert rank.count["success"] == int(stated["inference_stats"]["success"]["count"])
    assert rank.ns["queue"] == int(stated["inference_stats"]["queue"]["ns"])
    assert sum(size * calls for size, calls in rank.calls_by_batch.items()) == int(stated["inference_count"])
    assert sum(rank.calls_by_batch.values()) == int(stated["execution_count"])


def later(changes: dict[str, tuple[int, int]], calls: dict[str, int]) -> dict:
    """The sample after more requests of `rank`: (count, ns) by kind, calls of the stage by batch size."""
    statistics = copy.deepcopy(STATISTICS)
    rank = next(model for model in statistics["model_stats"] if model["name"] == "rank")
    for kind, (count, ns) in changes.items():
        entry = rank["inference_stats"].setdefault(kind, {})
        entry["count"] = str(int(entry.get("count", 0)) + count)
        entry["ns"] = str(int(entry.get("ns", 0)) + ns)
    for size, count in calls.items():
        batch = next((b for b in rank["batch_stats"] if b["batch_size"] == size), None)
        if batch is None:
            rank["batch_stats"].append({"batch_size": size, "compute_infer": {"count": str(count)}})
        else:
            batch["compute_infer"]["count"] = str(int(batch["compute_infer"]["count"]) + count)
    return statistics


def test_means_are_of_what_happened_in_between():
    after = later(
        {
            "success": (10, 50_000_000),
            "fail": (2, 0),
            "queue": (10, 10_000_000),
            "compute_input": (10, 1_000_000),
            "compute_infer": (10, 30_000_000),
            "compute_output": (10, 2_000_000),
        },
        {"1": 2, "61": 4},
    )
    found = compute_times(parse_statistics(STATISTICS), parse_statistics(after))
    assert found.keys() == {"rank"}
    rank = found["rank"]
    assert (rank.requests, rank.failed) == (12, 2)
    assert rank.queue_us == pytest.approx(1_000)
    assert rank.compute_input_us == pytest.approx(100)
    assert rank.compute_infer_us == pytest.approx(3_000)
    assert rank.compute_output_us == pytest.approx(200)
    assert rank.calls_by_batch == {1: 2, 61: 4}
    assert rank.mean_batch == pytest.approx((2 + 244) / 6)


def test_a_server_that_was_restarted_counts_from_zero():
    before = parse_statistics(later({"success": (10, 50_000_000)}, {"1": 10}))
    since_start = compute_times({}, parse_statistics(STATISTICS))["rank"]
    assert compute_times(before, parse_statistics(STATISTICS))["rank"] == since_start


def test_a_server_that_is_gone_has_no_times_and_ends_no_measurement():
    assert read_times_since(parse_statistics(STATISTICS), "127.0.0.1:9") == {}


def test_nothing_in_between_is_nothing():
    assert compute_times(parse_statistics(STATISTICS), parse_statistics(STATISTICS)) == {}


METRICS = """\
# HELP nv_cache_num_hits_per_model Number of cache hits per model
# TYPE nv_cache_num_hits_per_model counter
nv_cache_num_hits_per_model{{model="preprocess",version="1"}} {hits}
# TYPE nv_cache_num_misses_per_model counter
nv_cache_num_misses_per_model{{model="preprocess",version="1"}} {misses}
# TYPE table_hits counter
table_hits_total{{tier="ram"}} {hits}
# TYPE table_misses counter
table_misses_total{{tier="ram"}} 0
# TYPE lonely_hits counter
lonely_hits_total 5
"""


def test_hit_rates_come_from_pairs_of_counters():
    before = parse_metrics(METRICS.format(hits=100, misses=50))
    after = parse_metrics(METRICS.format(hits=190, misses=60))
    assert compute_hit_rates(before, after) == {"nv_cache_num model=preprocess,version=1": 0.9, "table tier=ram": 1.0}


TABLES = """\
# HELP recommender_table_rows Rows asked for, by what answered
# TYPE recommender_table_rows counter
recommender_table_rows{{answer="l1",instance="rank_0_0",table="user"}} {0}
recommender_table_rows{{answer="l1",instance="rank_0_1",table="user"}} {1}
recommender_table_rows{{answer="l2",instance="rank_0_0",table="user"}} {2}
recommender_table_rows{{answer="default_unknown",instance="rank_0_0",table="user"}} {3}
recommender_table_rows{{answer="l1",instance="rank_0_0",table="item"}} {4}
"""


def test_hit_rates_of_tables_are_of_the_rows_that_reached_a_level():
    before, after = parse_metrics(TABLES.format(10, 0, 5, 0, 9)), parse_metrics(TABLES.format(60, 20, 15, 10, 19))
    assert compute_hit_rates(before, after) == {"tables, l1": 0.8, "tables, l2": 0.5, "tables, l3": 0.0}
    assert compute_hit_rates(after, after) == {}


def test_without_lookups_there_is_no_rate():
    samples = parse_metrics(METRICS.format(hits=7, misses=7))
    assert compute_hit_rates(samples, samples) == {}
    assert compute_hit_rates({}, {}) == {}


def test_a_server_without_a_metrics_page_has_no_samples():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        hang_up = threading.Thread(target=lambda: listening.accept()[0].close())
        hang_up.start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/metrics"
        assert read_samples(url) == {}
        hang_up.join()
    assert read_samples(url) == {}


def test_memory_sums_each_page_once():
    processes = [
        ProcessMemory(name="a", pid=1, pss_mib=10.5, rss_mib=30),
        ProcessMemory(name="b", pid=2, pss_mib=4.5, rss_mib=30),
    ]
    assert sum_mib(processes) == 15.0
    assert sum_mib([]) == 0.0


def test_a_server_started_elsewhere_has_no_memory_figures():
    with PeakMemory(None) as memory:
        pass
    assert memory.peak == []
