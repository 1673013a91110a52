"""Load generators: requests recorded with a repository, drawn again by popularity, and two ways of sending them.

workload.py       ─▶ analyzer.py                       closed loop: perf_analyzer, one process per level
                  ─▶ schedule.py ─▶ open_loop.py       open loop: each request leaves when it is due
                                       └─ unary.py     gRPC at little cost, as the load shares the server's cores
"""
