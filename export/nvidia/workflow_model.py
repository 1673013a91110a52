"""model.py of `preprocess_workflow`: the workflow model of merlin-systems 23.8, which first verifies the manifest.

The workflow is a pickle, which runs code when it is opened, so no file is opened that is not the published one.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import triton_python_backend_utils as pb_utils
from merlin.systems.triton.models import workflow_model

from serving.contract.artifacts import verify_manifest
from serving.contract.errors import ArtifactError


class TritonPythonModel(workflow_model.TritonPythonModel):
    def initialize(self, args: dict[str, str]) -> None:
        try:
            verify_manifest(Path(args["model_repository"]) / args["model_version"])
        except ArtifactError as error:
            raise pb_utils.TritonModelException(f"{args['model_name']}: {error}") from error
        super().initialize(args)
