"""Describe the Redis and the Kafka that a server's live store names: whether they are reachable, and how far it is behind.

The helpers of the store (generation_helpers.py) state both, and the server's metrics page shows it a second later.
"""

from __future__ import annotations

from pathlib import Path

from server.helpers import generation_helpers
from server.state import ServerState
from server.status.metrics_page import read_samples
from serving.stages.live.measurements import PREFIX, REDIS_SILENT, SILENT

SILENT_S = 120.0  # of either helper; as in the alerts EventConsumerSilent and SharingSilent
WARNING = "WARNING: "
LAGS = {"kafka_lag", "redis_lag"}  # of `observe`: other models have metrics of the live store, too


def describe_redis_and_kafka(state: ServerState, run_dir: Path) -> list[str]:
    """Return a line for each of Redis and Kafka that the served generation's live settings name."""
    live_settings = generation_helpers.read_live_settings(state)
    if live_settings is None:
        return []
    info, settings = live_settings
    names = {"consume": f"Kafka at {settings.brokers}, topic {settings.topic}"} if settings.brokers else {}
    names |= {"share": f"Redis at {info.live_redis}"} if info.live_redis else {}
    if not names:
        return []
    values, missing = read_values(state), generation_helpers.list_missing(state)
    describers = {"consume": _describe_kafka, "share": _describe_redis}
    lines = []
    for helper, name in names.items():
        log = generation_helpers.make_log_path(state, run_dir, helper)
        if helper in missing:
            fault, text = True, f"not known, because `python -m live {helper}` does not run"
        elif LAGS - values.keys():
            fault, text = True, "not known, because the metrics page of the server does not say"
        else:
            fault, text = describers[helper](values)
        lines.append(f"{WARNING}{name}: {text}. See {log}" if fault else f"{name}: {text}")
    return lines


def read_values(state: ServerState) -> dict[str, float]:
    """Return what the served generation's metrics say of its live store, by name without prefix; {} if they cannot be read."""
    try:
        samples = read_samples(f"http://{state.host}:{state.ports.metrics}/metrics", state.generation)
    except (OSError, ValueError):
        return {}
    return {sample.name.removeprefix(f"{PREFIX}_"): sample.value for sample in samples if sample.name.startswith(PREFIX)}


def _describe_kafka(values: dict[str, float]) -> tuple[bool, str]:
    """Return whether something is wrong, and the state of Kafka in words."""
    if SILENT not in values:
        return True, "not known, because its consumer has not stated anything yet"
    lag, silent_s = int(values["kafka_lag"]), values[SILENT]
    if silent_s > SILENT_S:
        return True, f"its consumer has given no sign of life for {silent_s:.0f} s, so messages wait"
    if values["kafka_broker_down"]:
        return True, f"not reachable, so messages wait; {lag:,} were waiting when it last answered. It is tried again"
    if values["kafka_topic_missing"]:
        return True, "reachable, but it does not have the topic. Create it, or export with the name of the right one"
    return False, f"reachable, {lag:,} messages behind"


def _describe_redis(values: dict[str, float]) -> tuple[bool, str]:
    """Return whether something is wrong, and the state of Redis in words."""
    if REDIS_SILENT not in values:
        return True, "not known, because `python -m live share` has not stated anything yet"
    lag, silent_s, deferred = int(values["redis_lag"]), values[REDIS_SILENT], int(values["redis_deferred"])
    if silent_s > SILENT_S:
        return True, f"`python -m live share` has given no sign of life for {silent_s:.0f} s, so events wait"
    if values["redis_down"]:
        # Not all are known where `live share` was started meanwhile.
        waiting = f"at least {lag:,} events wait" if lag else "new events wait"
        return True, f"not reachable, or it takes no events; {waiting}. It is tried again"
    if deferred:
        listed = "`python -m live inspect` lists them"
        return True, f"reachable, {lag:,} events behind; {deferred:,} keys cannot be read, so their events wait: {listed}"
    return False, f"reachable, {lag:,} events behind"
