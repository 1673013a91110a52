"""NVIDIA's multi-stage recommender, as merlin-systems 23.8 exports it, beside ours on the same tritonserver.

    python -m experiments.merlin          (or `make baseline`)

    user id ─▶ user features ─▶ NVTabular ─▶ user tower ─▶ Faiss ─▶ item features ─▶ NVTabular ─▶ DLRM ─▶ best items

The graph is the one of NVIDIA's example, written with their public API (merlin.systems.dag, nvtabular); nothing of their
text is here. Three things differ from the example, all of them in the baseline's favour:

- features come from a table in memory, not from Feast (which is slower still: 335 ms against 233 in our notes);
- the networks run in ONNX Runtime inside the executor, with one hop less: merlin-systems' own PyTorch model calls `.cuda()` and
  TensorFlow has no backend in this server. Their weights are random: the widths cost the time, and answers are only compared
  between the variants;
- the last step takes the best items by score. The example's draws items at random, and two runs could not be compared.

Ours does more per request (history, seen items, a re-ranker, rules) and its weights are trained.
"""
