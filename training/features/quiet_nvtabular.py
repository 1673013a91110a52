"""NVTabular, imported without its remarks that there is neither a GPU nor TensorFlow here."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from nvtabular import ColumnSelector, Dataset, Workflow, ops

__all__ = ["ColumnSelector", "Dataset", "Workflow", "ops"]
