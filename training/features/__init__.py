"""Build features from a data set, for training and for the preprocess stage: states, workflow, plan, store.

build_features(dataset, train) -> Features
"""

from training.features.build import Examples, Features, build_features
from training.features.schema import FeatureSchema, FeatureSettings

__all__ = ["Examples", "FeatureSchema", "FeatureSettings", "Features", "build_features"]
