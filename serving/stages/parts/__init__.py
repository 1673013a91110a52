"""The stages split into parts, for repositories where each network is a model of its own (the merlin profile).

    preprocess  preprocess_features ─▶ preprocess_workflow ─▶ preprocess_tensors      with NVTabular itself
    retrieve    retrieve_features ─▶ towers_user ─▶ retrieve_search
    rank        rank_features ─▶ rank_embeddings ─▶ rank_dense ─▶ rank_scores      with NVIDIA's `hps` backend
                rank_rows ─────────────────────────▶ rank_dense ─▶ rank_scores      with our own tables
    rerank      rerank_list ─▶ rerank_network ─▶ rerank_rules

A part holds the same objects as the whole stage (`RankInputs`, `RankOutputs`, …), so both give the same answers. specs.py
names the tensors.
"""
