"""Find serving settings for this machine and this repository: `python -m perf.tune`, or `make tune REPO=…`.

    current settings ─▶ candidates (each setting alone, then combinations) ─▶ heats ─▶ half of them ─▶ … ─▶ winner ─▶ tuned.toml
                                                                                                      evidence ─▶ tuned.json

A heat serves a few candidates and the current settings side by side and measures them in turns, the others suspended. A
candidate's value is its ratio to the current settings in the same turn, so the machine may drift. Losers leave after one turn,
the best are measured again (successive halving). A candidate that breaks an SLO loses to all that keep it. The winner replaces
the current settings only if every turn agrees that it is better.

Why not Model Analyzer (by the source of 1.58):
- it varies only what config.pbtxt states (instances, batch sizes, queue delay): not a network's threads, the effort of a Faiss
  index, or the threads of numeric libraries, which come from the server's environment;
- it measures one configuration after the other, each once. The speed of a shared machine may change by half within minutes,
  which is more than the differences between settings;
- it copies every model of an ensemble, arrays and all, and renames the steps to variants.
It could start this server: its launch mode `local` accepts an executable on disk.
"""
