"""A shop's log as a Dataset. The format of `dataset.toml` is described in data/README.md."""

from export.dataset.dataset import Dataset, Report
from export.dataset.description import Description
from export.dataset.ids import stable_id
from export.dataset.load import BUNDLED, load_dataset
from export.dataset.split import split_by_time

__all__ = ["BUNDLED", "Dataset", "Description", "Report", "load_dataset", "split_by_time", "stable_id"]
