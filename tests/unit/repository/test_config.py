"""config.pbtxt: what is written parses back to the spec it came from, and carries what serving needs."""

from dataclasses import replace

import numpy as np
import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from repository.triton import config as c
from repository.triton.models import read_config, write_config
from serving.contract.errors import ExportError
from serving.contract.tensors import (
    STAGES,
    Axes,
    ContextColumn,
    ModelSpec,
    RecordSpec,
    TensorSpec,
    make_ensemble_spec,
    make_record,
    make_stage_specs,
)

SPECS = make_stage_specs(
    Axes(user_categorical=5, user_continuous=3), (ContextColumn("device", "string"), ContextColumn("hour", "continuous"))
)


def without_fills(spec: ModelSpec) -> ModelSpec:
    return replace(spec, inputs=tuple(replace(t, fill=None) for t in spec.inputs))


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_parses_back_to_its_spec(name, tmp_path):
    path = tmp_path / name / c.CONFIG_FILE
    path.parent.mkdir()
    write_config(path, c.make_stage_config(SPECS[name], c.Serving(), versions=[6, 7], warmup_rows=3))
    config = read_config(path)
    assert list(config.version_policy.specific.versions) == [6, 7]
    assert c.read_spec(config) == without_fills(SPECS[name])
    assert config.backend == "python"
    assert list(config.dynamic_batching.preferred_batch_size) == []
    assert not config.dynamic_batching.HasField("default_queue_policy")
    assert config.dynamic_batching.priority_levels == 0
    assert [w.batch_size for w in config.model_warmup] == [1, 1, 1, c.WARMUP_BATCH]
    assert all(set(w.inputs) == {t.name for t in SPECS[name].inputs} for w in config.model_warmup)


def test_a_type_that_no_tensor_has_is_named():
    config = c.make_stage_config(SPECS["rank"], c.Serving(), versions=[1], warmup_rows=0)
    config.input[0].data_type = pb.TYPE_BF16
    with pytest.raises(ExportError, match=f"rank/config.pbtxt: {config.input[0].name} has the type TYPE_BF16; expected one of"):
        c.read_spec(config)


@pytest.mark.parametrize(
    ("count", "groups"), [(1, [(1, 0)]), (2, [(1, 1), (1, c.LAST_RESORT)]), (4, [(1, 1), (3, c.LAST_RESORT)])]
)
def test_the_first_process_is_asked_before_the_others(count, groups):
    config = c.make_stage_config(SPECS["rank"], c.Serving(instances=count), versions=[1], warmup_rows=1)
    assert [(group.count, group.rate_limiter.priority) for group in config.instance_group] == groups


def test_priorities_and_queue_limits_are_written_when_asked_for():
    serving = c.Serving(queue_delay_us=50, priority_levels=2, queue_timeout_us=9_000, queue_length=7)
    batching = c.make_stage_config(SPECS["rank"], serving, versions=[1], warmup_rows=1).dynamic_batching
    assert (batching.max_queue_delay_microseconds, batching.priority_levels, batching.default_priority_level) == (50, 2, 1)
    policy = batching.default_queue_policy
    assert policy.timeout_action == pb.ModelQueuePolicy.REJECT
    assert (policy.default_timeout_microseconds, policy.max_queue_size, policy.allow_timeout_override) == (9_000, 7, True)


def test_the_ensemble_parses_back_and_pins_every_step():
    text = text_format.MessageToString(c.make_ensemble_config(SPECS, 7, c.Serving()))
    config = text_format.Parse(text, pb.ModelConfig())
    assert c.read_spec(config) == without_fills(make_ensemble_spec(SPECS))
    assert [(s.model_name, s.model_version) for s in config.ensemble_scheduling.step] == [(name, 7) for name in STAGES]
    assert list(config.version_policy.specific.versions) == [7]


def test_every_ensemble_tensor_that_is_read_is_an_input_or_some_steps_output():
    config = c.make_ensemble_config(SPECS, 1, c.Serving())
    written = {t.name for t in config.input}
    for step in config.ensemble_scheduling.step:
        assert set(step.input_map.values()) <= written
        assert not set(step.output_map.values()) & written
        written |= set(step.output_map.values())
    assert {t.name for t in config.output} <= written


def test_preferred_batch_sizes_stay_within_the_maximum():
    config = c.make_stage_config(
        SPECS["rank"], c.Serving(max_batch_size=16, preferred_batch_sizes=(8, 32)), versions=[1], warmup_rows=0
    )
    assert list(config.dynamic_batching.preferred_batch_size) == [8]


def test_edges_that_disagree_are_refused():
    user, candidates = SPECS["rank"].inputs
    assert isinstance(candidates, RecordSpec)
    other = make_record(
        "candidates", *(replace(t, dtype="INT32") if t.name == "candidate_ids" else t for t in candidates.fields)
    )
    rank = replace(SPECS["rank"], inputs=(user, other))
    with pytest.raises(ExportError, match=r"candidate_ids INT64 \[256\].* and rank expects .*candidate_ids INT32 \[256\]"):
        c.check_edges({**SPECS, "rank": rank})


def test_an_output_nobody_uses_is_refused():
    rank = replace(SPECS["rank"], outputs=(*SPECS["rank"].outputs, TensorSpec("spare", "FP32", (1,))))
    with pytest.raises(ExportError, match="No stage uses spare"):
        c.check_edges({**SPECS, "rank": rank})


def test_the_contract_itself_has_sound_edges():
    kinds: dict[str, set] = {}
    for tensor in (
        t for spec in SPECS.values() for t in (*spec.inputs, *spec.outputs, *spec.input_fields, *spec.output_fields)
    ):
        kinds.setdefault(tensor.name, set()).add(tensor.text)
    assert {name: len(found) for name, found in kinds.items()} == dict.fromkeys(kinds, 1)  # one meaning at both ends
    c.check_edges(SPECS)  # the check finds so, too


def test_warmup_strings_carry_their_length():
    assert c.encode_warmup(np.array([[b"ab"], [b""]], object)) == b"\x02\0\0\0ab\0\0\0\0"
    assert c.encode_warmup(np.array([[1.5]], np.float32)) == np.float32(1.5).tobytes()
