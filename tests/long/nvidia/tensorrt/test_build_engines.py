"""The engine builder against TensorRT 8.6, 10 and 11 as their packages really are (api.json), and where nothing is there."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from export.nvidia.tensorrt import build_engines
from export.nvidia.tensorrt.build_engines import NoEngine, PythonBuilder, TrtexecBuilder, compute_cache_key
from tests.unit.nvidia.tensorrt.conftest import publish
from tests.unit.nvidia.tensorrt.fake_tensorrt import API, FAKES, VERSIONS, fake
from tests.waiting import until

SCRIPT = Path(build_engines.__file__)


def start(repository: Path, cache: Path, backends: Path, **environment: str) -> subprocess.CompletedProcess:
    """The script as the container runs it: a process of its own, nothing of this project to import."""
    command = [sys.executable, str(SCRIPT), "--repository", str(repository), "--cache", str(cache), "--backends", str(backends)]
    clean = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(FAKES)} | environment
    return subprocess.run(command, env=clean, cwd="/", capture_output=True, text=True, timeout=120)


def config_of(version: Path) -> pb.ModelConfig:
    return text_format.Parse((version.parent / "config.pbtxt").read_text(), pb.ModelConfig())


def build(trt_version: str, version: Path) -> dict:
    """Return what the fake of that version was asked to build."""
    builder, engine = PythonBuilder(fake(trt_version)), json.loads((version / "engine.json").read_text())
    plan = version.parent / "out.plan"
    builder.build(version / "model.onnx", engine, plan)
    builder.check(plan, engine)
    return json.loads(plan.read_bytes())


def test_the_script_needs_nothing_but_the_standard_library():
    from tests.unit.test_layers import read_source

    assert {name.split(".")[0] for name in read_source(SCRIPT).imports} <= set(sys.stdlib_module_names) | {"tensorrt"}


def test_the_fake_lacks_what_the_real_packages_lack():
    for version in VERSIONS:
        trt = fake(version)
        for name, worth in API.items():
            found: object = trt
            for part in name.split("."):
                found = getattr(found, part, None) if not name.startswith("DataType") else True
            assert (found is not None or name in FAKED_AS_NONE) or worth[version] is None, (version, name)
    with pytest.raises(AttributeError):
        _ = fake("11.4.0").NetworkDefinitionCreationFlag.EXPLICIT_BATCH
    with pytest.raises(AttributeError):
        fake("11.4.0").ILayer.precision  # noqa: B018


FAKED_AS_NONE = {  # they exist, and nothing may call them: their successors disappeared later
    "Builder.build_engine",
    "Builder.max_batch_size",
    "Builder.platform_has_fast_fp16",
    "IBuilderConfig.max_workspace_size",
    "IBuilderConfig.set_calibration_profile",
    "IBuilderConfig.int8_calibrator",
    "ICudaEngine.num_bindings",
    "ICudaEngine.device_memory_size",
}


@pytest.mark.parametrize("trt_version", VERSIONS)
@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
def test_every_generation_builds_every_precision(trt_version, precision, tmp_path):
    built = build(trt_version, publish(tmp_path / "repo", precision))
    assert built["profiles"] == [{"x": [[1, 3], [usual, 3], [8, 3]]} for usual in (1, 4)]
    assert built["workspace"] == 1 << 30
    assert "TF32" not in built["flags"]
    if trt_version.startswith("8"):
        assert not built["typed"]
        assert ("FP16" in built["flags"], "INT8" in built["flags"]) == (precision == "fp16", precision == "int8")
        assert built["kept"] == ([] if precision == "fp32" else ["last"])
        assert ("OBEY_PRECISION_CONSTRAINTS" in built["flags"]) == (precision != "fp32")
    else:
        assert built["typed"]
        assert built["flags"] == built["kept"] == []


@pytest.mark.parametrize("trt_version", VERSIONS)
def test_what_tensorrt_refuses_is_said(trt_version, version):
    builder, engine = PythonBuilder(fake(trt_version)), json.loads((version / "engine.json").read_text())
    plan = version / "model.plan"
    broken = version / "broken.onnx"
    broken.write_bytes(b"\xff not onnx")
    with pytest.raises(NoEngine, match=r"cannot read .*broken\.onnx: not an ONNX model"):
        builder.build(broken, engine, plan)
    upside_down = engine | {"profiles": [{"x": [[8, 3], [4, 3], [1, 3]]}]}
    with pytest.raises(NoEngine, match="refuses profile 0"):
        builder.build(version / "model.onnx", upside_down, plan)
    with pytest.raises(NoEngine, match="could not build an engine"):
        builder.build(version / "model.onnx", engine | {"profiles": []}, plan)
    plan.write_bytes(b"{")
    with pytest.raises(NoEngine, match="does not load"):
        builder.check(plan, engine)
    builder.build(version / "model.onnx", engine, plan)
    with pytest.raises(NoEngine, match=r"takes the inputs \['x'\], expected \['z'\]"):
        builder.check(plan, engine | {"profiles": [{"z": engine["profiles"][0]["x"]}]})
    with pytest.raises(NoEngine, match="has 2 profiles, expected 1"):
        builder.check(plan, engine | {"profiles": engine["profiles"][:1]})


def test_a_plan_of_another_version_does_not_load(version):
    engine, plan = json.loads((version / "engine.json").read_text()), version / "model.plan"
    PythonBuilder(fake("10.0.1")).build(version / "model.onnx", engine, plan)
    with pytest.raises(NoEngine, match=r"TensorRT 11.4.0 does not load"):
        PythonBuilder(fake("11.4.0")).check(plan, engine)


def test_the_cache_key_is_of_everything_an_engine_fits(version):
    onnx, engine = version / "model.onnx", json.loads((version / "engine.json").read_text())
    other = version / "other.onnx"
    other.write_bytes(onnx.read_bytes() + b" ")
    keys = [
        compute_cache_key(onnx, engine, "10.0.1", "sm_90"),
        compute_cache_key(other, engine, "10.0.1", "sm_90"),
        compute_cache_key(onnx, engine, "11.4.0", "sm_90"),
        compute_cache_key(onnx, engine, "10.0.1", "sm_80"),
        compute_cache_key(onnx, engine | {"precision": "fp16"}, "10.0.1", "sm_90"),
        compute_cache_key(onnx, engine | {"fp32_nodes": ["first"]}, "10.0.1", "sm_90"),
        compute_cache_key(onnx, engine | {"profiles": engine["profiles"][:1]}, "10.0.1", "sm_90"),
    ]
    assert len(set(keys)) == len(keys)
    assert keys[0] == compute_cache_key(onnx, engine, "10.0.1", "sm_90")


@pytest.mark.parametrize("trt_version", [VERSIONS[0], VERSIONS[-1]])
def test_the_script_places_an_engine_and_builds_it_once(trt_version, version, tmp_path):
    repository, cache = version.parents[1], tmp_path / "cache"
    first = start(repository, cache, tmp_path, FAKE_TENSORRT=trt_version)
    assert first.returncode == 0, first.stderr
    assert "rank_dense: served by tensorrt" in first.stderr
    plan = version / "model.plan"
    assert json.loads(plan.read_bytes())["version"] == trt_version
    assert config_of(version).platform == "tensorrt_plan"
    built_at, config_at = plan.stat().st_mtime_ns, (version.parent / "config.pbtxt").stat().st_mtime_ns
    assert start(repository, cache, tmp_path, FAKE_TENSORRT=trt_version).returncode == 0
    assert (plan.stat().st_mtime_ns, (version.parent / "config.pbtxt").stat().st_mtime_ns) == (built_at, config_at)
    assert len(list(cache.glob("*.plan"))) == 1
    assert not [path for path in repository.iterdir() if path.is_file()]


def test_another_tensorrt_builds_another_engine_beside_the_first(version, tmp_path):
    for trt_version in ("10.0.1", "11.4.0"):
        start(version.parents[1], tmp_path / "cache", tmp_path, FAKE_TENSORRT=trt_version)
        assert json.loads((version / "model.plan").read_bytes())["version"] == trt_version
    assert len(list((tmp_path / "cache").glob("*.plan"))) == 2


def test_a_damaged_cache_is_built_again(version, tmp_path):
    cache = tmp_path / "cache"
    start(version.parents[1], cache, tmp_path, FAKE_TENSORRT="10.0.1")
    (plan,) = cache.glob("*.plan")
    whole = plan.read_bytes()
    plan.write_bytes(whole[:10])
    assert start(version.parents[1], cache, tmp_path, FAKE_TENSORRT="10.0.1").returncode == 0
    assert plan.read_bytes() == (version / "model.plan").read_bytes() == whole


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({}, "neither TensorRT's Python module (libnvinfer.so cannot be opened) nor trtexec"),
        ({"FAKE_TENSORRT": "11.4.0", "FAKE_TENSORRT_CRASHES": "1"}, "the build ended with -6"),
        ({"FAKE_TENSORRT": "11.4.0", "FAKE_GPUS": "0"}, "finds no GPU"),
        ({"FAKE_TENSORRT": "11.4.0", "PYTHONPATH": ""}, "neither TensorRT's Python module"),
    ],
)
def test_where_no_engine_can_be_had_onnx_runtime_serves_with_a_warning(environment, reason, version, tmp_path):
    (tmp_path / "backends" / "onnxruntime").mkdir(parents=True)
    run = start(version.parents[1], tmp_path / "cache", tmp_path / "backends", **environment)
    assert run.returncode == 0, run.stderr
    assert "WARNING: rank_dense: " in run.stderr
    assert reason in run.stderr
    config = config_of(version)
    assert (config.backend, config.default_model_filename) == ("onnxruntime", "model.onnx")
    assert not (version / "model.plan").exists()


def test_images_without_that_backend_run_onnx_runtime_in_python(version, tmp_path):
    run = start(version.parents[1], tmp_path / "cache", tmp_path)
    assert run.returncode == 0
    assert config_of(version).backend == "python"
    back = start(version.parents[1], tmp_path / "cache", tmp_path, FAKE_TENSORRT="8.6.1")
    assert back.returncode == 0
    assert config_of(version).platform == "tensorrt_plan"


def test_one_version_without_an_engine_takes_the_whole_model_to_its_stand_in(version, tmp_path):
    second = publish(version.parents[1], generation=2)
    (second / "model.onnx").write_bytes(b"\xff not onnx")
    run = start(version.parents[1], tmp_path / "cache", tmp_path, FAKE_TENSORRT="10.0.1")
    assert run.returncode == 0
    assert "not an ONNX model" in run.stderr
    assert config_of(version).backend == "python"


def test_without_a_repository_it_ends_with_a_message(tmp_path):
    run = start(tmp_path / "nowhere", tmp_path / "cache", tmp_path)
    assert run.returncode == 2
    assert "there is no model repository" in run.stderr


def test_a_repository_that_cannot_be_prepared_ends_with_a_message(version, tmp_path):
    (version.parent / "configs" / "python.pbtxt").unlink()
    run = start(version.parents[1], tmp_path / "cache", tmp_path)
    assert run.returncode == 2
    assert "python.pbtxt" in run.stderr
    assert "Mount it writable, as it was exported" in run.stderr


def test_a_copy_that_fails_leaves_no_half_file(version, monkeypatch):
    def fill_the_disk(source, target):
        target.write_bytes(b"half")
        raise OSError("No space left on device")

    before = sorted(version.parents[1].iterdir())
    monkeypatch.setattr(shutil, "copyfile", fill_the_disk)
    with pytest.raises(OSError, match="No space left"):
        build_engines.place(version / "model.onnx", version / "model.plan")
    assert sorted(version.parents[1].iterdir()) == before
    assert not (version / "model.plan").exists()


TRTEXEC = """#!/bin/sh
case "$1" in
--help) printf '%s\\n' '&&&& RUNNING TensorRT.trtexec [TensorRT v{version}] # trtexec --help' {options} ;;
--loadEngine=*) test -s "${{1#--loadEngine=}}" ;;
*) for a in "$@"; do case "$a" in --saveEngine=*) echo "$@" > "${{a#--saveEngine=}}" ;; esac; done ;;
esac
"""
OF_8 = ("8601", "'--minShapes=spec' '--fp16' '--layerPrecisions=spec'")
OF_11 = ("110400", "'--minShapes=spec' '--profile=0 --minShapes=<spec>' '--stronglyTyped'")


def trtexec(folder: Path, version: str, options: str) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "trtexec"
    path.write_text(TRTEXEC.format(version=version, options=options))
    path.chmod(0o755)
    return path


def test_trtexec_of_11_is_given_all_profiles_and_no_precision_flags(tmp_path):
    version = publish(tmp_path / "repo", "fp16")
    builder = TrtexecBuilder(str(trtexec(tmp_path / "bin", *OF_11)))
    command = builder.make_command(version / "model.onnx", json.loads((version / "engine.json").read_text()), tmp_path / "p")
    assert builder.version == "trtexec 110400"
    assert not builder.one_profile
    assert command[1:] == [
        f"--onnx={version / 'model.onnx'}",
        f"--saveEngine={tmp_path / 'p'}",
        "--skipInference",
        "--noTF32",
        "--memPoolSize=workspace:1024",
        "--stronglyTyped",
        *("--profile=0", "--minShapes=x:1x3", "--optShapes=x:1x3", "--maxShapes=x:8x3"),
        *("--profile=1", "--minShapes=x:1x3", "--optShapes=x:4x3", "--maxShapes=x:8x3"),
    ]


@pytest.mark.parametrize(("precision", "flag"), [("fp16", "--fp16"), ("int8", "--int8")])
def test_trtexec_of_8_is_told_the_precision_and_knows_one_profile(tmp_path, precision, flag):
    version = publish(tmp_path / "repo", precision)
    builder = TrtexecBuilder(str(trtexec(tmp_path / "bin", *OF_8)))
    command = builder.make_command(version / "model.onnx", json.loads((version / "engine.json").read_text()), tmp_path / "p")
    assert builder.one_profile
    assert command[6:] == [
        flag,
        "--precisionConstraints=obey",
        "--layerPrecisions=last:fp32",
        *("--minShapes=x:1x3", "--optShapes=x:4x3", "--maxShapes=x:8x3"),
    ]


def test_an_engine_of_one_profile_is_served_by_a_config_that_names_one(version, tmp_path):
    trtexec(tmp_path / "bin", *OF_8)
    run = start(version.parents[1], tmp_path / "cache", tmp_path, PATH=f"{tmp_path / 'bin'}:/usr/bin:/bin")
    assert "served by tensorrt_one_profile" in run.stderr, run.stderr
    (group,) = config_of(version).instance_group
    assert list(group.profile) == ["0"]
    assert (version / "model.plan").is_file()


def test_a_build_that_takes_too_long_leaves_no_process_and_no_unfinished_plan(version, tmp_path, monkeypatch):
    path, started = trtexec(tmp_path / "bin", *OF_11), tmp_path / "started"
    hang = f"""*) for a in "$@"; do case "$a" in --saveEngine=*) echo half > "${{a#--saveEngine=}}" ;; esac; done
echo $$ > {started}.new; mv {started}.new {started}; sleep 60 ;;"""
    text = path.read_text()
    path.write_text(text[: text.index("*) for a")] + hang + "\nesac\n")
    monkeypatch.setenv("PATH", f"{path.parent}:/usr/bin:/bin")
    monkeypatch.setenv("PYTHONPATH", str(FAKES))

    def time_out_once_trtexec_runs(child, timeout):
        until(started.exists)
        raise subprocess.TimeoutExpired(child.args, timeout)

    monkeypatch.setattr(subprocess.Popen, "communicate", time_out_once_trtexec_runs)
    with pytest.raises(NoEngine, match="did not end within 1800 s"):
        build_engines.build_apart(version, tmp_path / "cache", tmp_path)
    assert list((tmp_path / "cache").iterdir()) == []
    process = int(started.read_text())
    until(lambda: not psutil.pid_exists(process) or psutil.Process(process).status() == psutil.STATUS_ZOMBIE)


@pytest.fixture
def backends(tmp_path: Path) -> Path:
    """Return the folder of a tritonserver whose TensorRT backend needs libnvinfer.so.8."""
    backend = tmp_path / "backends" / "tensorrt" / "libtriton_tensorrt.so"
    backend.parent.mkdir(parents=True)
    backend.write_bytes(b"\x7fELF\0libcudart.so.12\0libnvinfer.so.8\0libnvinfer_plugin.so.8\0")
    return backend.parents[1]


def test_an_engine_that_tritonserver_would_not_load_is_not_built(version, backends, tmp_path):
    path = trtexec(tmp_path / "bin", "100001", "'--profile=0'")
    environment = {"PATH": f"{path.parent}:/usr/bin:/bin", "FAKE_TENSORRT": "10.13.3", "FAKE_SERVED": "8603"}
    run = start(version.parents[1], tmp_path / "cache", backends, **environment)
    assert run.returncode == 0, run.stderr
    expected = "tritonserver loads TensorRT 8603 and no engine of another version, but the Python module is 101303, "
    assert f"{expected}{path} is 100001. It is served by ONNX Runtime" in run.stderr
    assert config_of(version).backend == "python"
    assert not (version / "model.plan").exists()


@pytest.mark.parametrize("served", [{"FAKE_SERVED": "8601"}, {}])
def test_tritonservers_own_version_builds_and_so_does_any_where_it_is_unknown(version, backends, tmp_path, served):
    path = trtexec(tmp_path / "bin", *OF_8)
    environment = {"PATH": f"{path.parent}:/usr/bin:/bin", "FAKE_TENSORRT": "8.6.1", **served}
    assert start(version.parents[1], tmp_path / "cache", backends, **environment).returncode == 0
    assert json.loads((version / "model.plan").read_bytes())["version"] == "8.6.1"


def test_trtexec_of_tritonservers_version_builds_where_the_python_module_is_of_another(version, backends, tmp_path):
    path = trtexec(tmp_path / "bin", *OF_8)
    environment = {"PATH": f"{path.parent}:/usr/bin:/bin", "FAKE_TENSORRT": "10.0.1", "FAKE_SERVED": "8601"}
    assert start(version.parents[1], tmp_path / "cache", backends, **environment).returncode == 0
    assert "--onnx=" in (version / "model.plan").read_text()
    assert list(config_of(version).instance_group[0].profile) == ["0"]


def test_trtexec_that_fails_is_quoted(version, tmp_path):
    path = trtexec(tmp_path / "bin", *OF_8)
    builder, engine = TrtexecBuilder(str(path)), json.loads((version / "engine.json").read_text())
    path.write_text("#!/bin/sh\necho 'out of memory'\nexit 1\n")
    with pytest.raises(NoEngine, match="ended with 1: out of memory"):
        builder.build(version / "model.onnx", engine, tmp_path / "p")
    with pytest.raises(NoEngine, match=r"does not load .*p: out of memory"):
        builder.check(tmp_path / "p", engine)
    with pytest.raises(NoEngine, match="does not start: out of memory"):
        TrtexecBuilder(str(path))
