"""Profile a served repository.

    python -m perf             sweep, open-loop load, in-process baseline, report and SLO verdict, in a few minutes
    python -m perf COMMAND     sweep, load, report, gate, models or ab; docs/perf.md describes each
    python -m perf live        the live loop: events, changed items, and answers that know them
    python -m perf.tune        search serving settings under the SLO

Two kinds of load answer two questions:

    closed loop   perf_analyzer: N clients, each sends when its last answer arrived. Shows capacity, and the latency with N
                  clients. When the server slows down, so does the load (coordinated omission).
    open loop     requests are due at times drawn beforehand (Poisson, bursts, the log's own). Latency counts from the instant
                  a request was due, so that waiting for the generator or for the server is counted.

The in-process baseline calls the same published stages without a server, in the same minutes. Served minus in-process is the
cost of serving. Results go to perf/results/<stamp>/: run.json, raw requests, report.html and its pictures. The last line on
stdout is one JSON document, which the SLO gate reads.

    target.py               the measured server: found, or started here; several servers take turns
    bench.py, sweep.py      one server with its requests; the measurements that make a run
    load/                   requests, and two ways to send them
    observe.py              latencies, the server's counters, cache hit rates, memory
    in_process.py           the in-process baseline
    answers.py, recall.py   conditions of a valid figure: equal answers, and enough recall of the index
    models.py               what each model costs in a request, in process
    live/                   measurements of the live loop; figures.py, how a measurement with bounds ends
    report/, slo.py         run.json, tables, pictures and page; the SLO gate
    ab.py, ratio.py         two repositories or commits in turns; the ratio of two measurements
    cli.py, command.py      the commands; progress, and how each command ends
"""
