"""Import NVTabular without its warnings about a missing GPU and TensorFlow."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from nvtabular import ColumnSelector, Dataset, Workflow, ops

__all__ = ["ColumnSelector", "Dataset", "Workflow", "ops"]
