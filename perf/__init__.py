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

The rooms, in the order of a measurement: load/ asks, observe/ watches the server, report/ keeps and shows it. In this folder,
what all share:

    target.py, turns.py         the server that is measured; several of them, of which one at a time runs
    bench.py, measure.py        one server and its requests; the measurements, each of which adds to a run
    in_process.py               the yardstick
    answers.py, recall.py       what figures count for: equal answers, and an index that finds enough
    figure.py, slo.py           a figure beside its bound, a ratio; the gate
    variant.py                  a repository with other settings, made in a moment
    cli.py, command.py          the commands, and how each ends
    full.py, ab.py, growth.py   three of them; whole benchmarks are rooms: overhead/, merlin/, tiers/, tune/, cache/, quality/
                                (what smaller networks and rows lose), parts/ (a stage's kernel alone)
"""
