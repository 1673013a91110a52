"""How fast a repository is served, and where the time goes.

    python -m perf             sweep + open-loop load + yardstick + report + SLO verdict, in a few minutes
    python -m perf COMMAND     one of them, or another question: docs/perf.md lists all

Two kinds of load, because they answer different questions:

    closed loop   perf_analyzer: N clients, each sends when its last answer came. Shows capacity, and the latency at N clients.
                  When the server slows down, so does the load: it never shows what a queue does to users.
    open loop     ours: requests are due at times drawn beforehand (Poisson, bursts, the log's own). Latency counts from the
                  instant a request was due, so that one that had to wait for the generator or for the server is not flattered.

Beside both, in the same minutes on the same machine, the yardstick: the same published kernels called in one process without a
server. Served minus in-process is what serving costs. Results are a folder perf/results/<stamp>/ with run.json, raw requests,
report.html and PNGs; the last line on stdout is one JSON document, the one the SLO gate reads.

The rooms, in the order of a measurement: load/ asks, observe/ watches the server, report/ keeps and shows it. Whole benchmarks:
overhead/, merlin/, tiers/, tune/, quality/ (what smaller networks and rows lose), parts/ (a stage's kernel alone).
"""
