"""Making the ranker smaller: distillation, pruning, int8."""
