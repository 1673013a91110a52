"""The re-ranker's network as ONNX: every layer one matrix product over the places of all requests, none that computes shapes.

    features, vectors, valid ─▶ places [N · M, F + D + 1] ─▶ enter ─▶ hidden [N · M, W + 1], of which the last column is valid
    hidden ─▶ query, key, value of each head [N, M, d] ─▶ attention ─▶ merge ─▶ + hidden ─▶ norm
           ─▶ widen ─▶ narrow ─▶ + ─▶ norm ─▶ leave ─▶ correction [N, M]

What is padding is told apart by one more part of query and key, 1 and -MASKED or 0, not by a pass over all pairs. The trace of
reranker.py has four times the nodes.

Letters as in reranker.py; W hidden width, d = W / heads + 1.
"""

from __future__ import annotations
