"""Load a shop's log as a Dataset. data/README.md describes the format of `dataset.toml`."""

from training.dataset.dataset import Dataset, Report
from training.dataset.description import Description
from training.dataset.load import BUNDLED, load_dataset
from training.dataset.split import keep_known, split_log

__all__ = ["BUNDLED", "Dataset", "Description", "Report", "keep_known", "load_dataset", "split_log"]
