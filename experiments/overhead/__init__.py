"""What serving costs beyond the kernels: `python -m perf overhead`.

rounds.py asks both layouts, each beside itself with kernels that compute nothing (empty.py), and the kernels without a server,
in turns; breakdown.py says where the time of one client's request goes; bounds.py puts every figure beside its bound.
"""
