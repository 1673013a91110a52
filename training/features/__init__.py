"""From a data set to what models train on and the preprocess stage serves: states, workflow, plan, store.

build_features(dataset, train) -> Features
"""

from training.features.build import Examples, Features, build_features
from training.features.schema import FeatureSchema, FeatureSettings

__all__ = ["Examples", "FeatureSchema", "FeatureSettings", "Features", "build_features"]
