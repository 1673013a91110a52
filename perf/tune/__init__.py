"""Which serving settings suit this machine and this repository: `python -m perf.tune`, or `make tune REPO=…`.

    current settings ─▶ candidates (each setting alone, then combinations) ─▶ heats ─▶ half of them ─▶ … ─▶ winner ─▶ tuned.toml
                                                                                                      evidence ─▶ tuned.json

A heat serves a few candidates and the current settings side by side and asks them in turns, the others stopped: what a
candidate is worth is its ratio to the current settings in the same turn, so the machine may drift. Losers leave after one turn,
the best are asked again (successive halving). A candidate that breaks an SLO loses to all that keep it. The winner replaces
the current settings only if every turn agrees that it is better.

Why not Model Analyzer (by the source of 1.58):
- it varies what config.pbtxt says (instances, batch sizes, queue delay) and nothing else. Threads of a network and the effort
  of a Faiss index are not there, nor are threads of the numeric libraries, which are the server's environment;
- it measures one configuration after the other, each once. The machines this runs on change their speed by half within
  minutes, which is more than what is looked for;
- it copies every model of an ensemble, arrays and all, and renames the steps to variants.
It could start this server: its launch mode `local` accepts an executable on disk.
"""
