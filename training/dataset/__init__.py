"""Load a shop's log as a Dataset. data/README.md describes the format of `dataset.toml`."""

from training.dataset.dataset import Dataset, Report
from training.dataset.description import Description
from training.dataset.load import BUNDLED, load_dataset
from training.dataset.split import split_log

__all__ = ["BUNDLED", "Dataset", "Description", "Report", "load_dataset", "split_log"]
