"""What 1, 13 and 64 missing rows add to a look-up of 256 keys, against as many raw reads of the device.

The device is read by Python's threads, as RocksDB is here, and by native ones, which is all that it can do. Timed are bare
look-ups, and their medians compared: no request around them, and no tail. Each reads blocks drawn for itself: one that was just
read comes back sooner, and natively read after Python's threads they looked six times as fast where the disk was cold.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from experiments.tiers.device import RawDevice, read_through
from experiments.tiers.native_device import NativeDevice
from experiments.tiers.traffic import KEYS_PER_REQUEST, TABLE, latencies_us, resident_keys, tiers_over, write_table

MISSES = (1, 13, 64)


def bench_misses(folder: Path, rows: int, rng: np.random.Generator, n_requests: int = 300) -> list[dict]:
    source, results = write_table(folder, rows, rng), []
    device, native = (kind(f"{source}/{TABLE}.npy") for kind in (RawDevice, NativeDevice))
    native.read(np.arange(MISSES[-1]))  # compiles
    with tiers_over(rows, source, l2_rows=rows // 10) as tiers:
        read_through(source)
        resident = resident_keys(tiers, rows // 10)

        def lookup(keys: np.ndarray) -> None:
            tiers.lookup(TABLE, keys)

        for n_misses in MISSES:
            absent = rng.integers(rows // 5, rows, (3, n_requests, n_misses))  # beyond what was filled in
            elapsed_us: dict[str, list[float]] = {"device": [], "native": [], "hits": [], "mixed": []}
            for missing, of_device, of_native in zip(*absent, strict=True):
                hits = rng.choice(resident, KEYS_PER_REQUEST)
                mixed = np.concatenate([missing, hits[n_misses:]])
                elapsed_us["device"] += latencies_us(device.read, of_device[None]).tolist()
                elapsed_us["native"] += latencies_us(native.read, of_native[None]).tolist()
                elapsed_us["hits"] += latencies_us(lookup, hits[None]).tolist()
                elapsed_us["mixed"] += latencies_us(lookup, mixed[None]).tolist()
                tiers.settle()
            results.append({"misses": n_misses, **_added(elapsed_us)})
            print(
                "{misses:3} misses add {added_us:8.1f} us; the device alone takes {device_us:8.1f} us: {ratio:.2f}, "
                "read by native threads {native_us:8.1f} us: {native_ratio:.2f}".format(**results[-1])
            )
    device.close()
    native.close()
    return results


def _added(elapsed_us: dict[str, list[float]]) -> dict[str, float]:
    medians_us = {name: float(np.median(us)) for name, us in elapsed_us.items()}
    added_us = medians_us["mixed"] - medians_us["hits"]
    result = {"added_us": round(added_us, 1)}
    for device, ratio in (("device", "ratio"), ("native", "native_ratio")):
        result |= {f"{device}_us": round(medians_us[device], 1), ratio: round(added_us / medians_us[device], 2)}
    return result
