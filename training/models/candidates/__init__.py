"""Models that propose candidates: item-item neighbours, two towers, sequence and graph model, in one retriever."""
