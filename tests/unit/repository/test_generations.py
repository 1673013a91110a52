"""The generation that a repository answers with: the reader without protobuf against the official one."""

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from repository.triton.config import Serving, make_ensemble_config, make_stage_config
from serving.contract.errors import ArtifactError
from serving.contract.generations import read_pinned_generation
from serving.contract.tensors import ENSEMBLE, Axes, make_ensemble_spec, make_stage_specs
from serving.pipeline import Pipeline

SPECS = make_stage_specs(Axes())


def repository(folder, text):
    path = folder / ENSEMBLE / "config.pbtxt"
    path.parent.mkdir()
    path.write_text(text)
    return folder


@pytest.mark.parametrize(
    "config",
    [make_ensemble_config(SPECS, 1207, Serving()), make_stage_config(make_ensemble_spec(SPECS), Serving(), [1207], 2)],
    ids=["steps", "one model"],
)
@pytest.mark.parametrize("one_line", [False, True])
def test_it_reads_what_protobuf_writes(tmp_path, config, one_line):
    text = text_format.MessageToString(config, as_one_line=one_line)
    assert list(text_format.Parse(text, pb.ModelConfig()).version_policy.specific.versions) == [1207]
    assert read_pinned_generation(repository(tmp_path, text)) == 1207


def test_lists_and_comments_are_protobufs_too(tmp_path):
    text = "version_policy: { # was versions: 7, model_version: 8\n  specific { versions: [ 3 ] } }"
    assert list(text_format.Parse(text, pb.ModelConfig()).version_policy.specific.versions) == [3]
    assert read_pinned_generation(repository(tmp_path, text)) == 3


@pytest.mark.parametrize(
    ("text", "pins"),
    [
        ("version_policy { specific { versions: [1, 2] } }", r"\[1, 2\]"),
        ("version_policy { specific { versions: 1 versions: 2 } }", r"\[1, 2\]"),
        ("version_policy { specific { versions: 1 } } ensemble_scheduling { step { model_version: 3 } }", r"\[1, 3\]"),
        ("version_policy { latest { num_versions: 1 } }", r"\[\]"),
    ],
)
def test_it_refuses_what_names_not_one(tmp_path, text, pins):
    with pytest.raises(ArtifactError, match=rf"pinned to versions {pins}; expected one .*export pin"):
        read_pinned_generation(repository(tmp_path, text))


def test_no_repository(tmp_path):
    with pytest.raises(ArtifactError, match=r"recommend/config\.pbtxt cannot be read: No such file.*make export"):
        Pipeline.load(tmp_path)


def test_bytes_that_are_no_text_are_refused_with_a_remedy(tmp_path):
    """`make check` and the supervisor report what a repository is, and must not end with it."""
    path = repository(tmp_path, "") / "recommend" / "config.pbtxt"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ArtifactError, match=r"recommend/config\.pbtxt cannot be read: .*decode byte 0xff.*make export"):
        read_pinned_generation(tmp_path)
