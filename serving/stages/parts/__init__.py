"""The stages in parts, for repositories where the network between them is a model of its own (the merlin profile).

    preprocess  preprocess_features ─▶ preprocess_workflow ─▶ preprocess_tensors      where NVTabular itself encodes
    retrieve    retrieve_features ─▶ towers_user ─▶ retrieve_search
    rank        rank_features ─▶ rank_embeddings ─▶ rank_dense ─▶ rank_scores      behind NVIDIA's `hps` backend
                rank_rows ─────────────────────────▶ rank_dense ─▶ rank_scores      over our own tiers
    rerank      rerank_list ─▶ rerank_network ─▶ rerank_rules

Each part holds the objects that the whole stage is made of (`RankInputs`, `RankOutputs`, …), so both answer alike.
specs.py names the tensors.
"""
