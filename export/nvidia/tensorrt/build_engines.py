"""Build the TensorRT engines of a model repository on the machine that serves them: the first step of the start script.

    python3 build_engines.py --repository /models --cache /engines

Needs Python 3.8 and TensorRT 8.6, 10 or 11 (its Python module, or trtexec), and nothing else; every API is looked up by name.
For each <model>/<generation>/engine.json beside a model.onnx it places a model.plan, out of the cache when it can.

An engine fits one ONNX file, one TensorRT version, one GPU architecture, one precision and one set of profiles: these are the
cache's key. A TensorRT of another version than tritonserver's own builds nothing, because its engines would not load there.
Each build runs in a process of its own, so that even a crash of TensorRT does not keep the server from starting.
Without an engine, ONNX Runtime serves the model: its config.pbtxt is replaced, with a warning.

Unchanged files are not written again, because tritonserver reloads a version when one of its files changes.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import uuid
from contextlib import suppress
from pathlib import Path

ENGINE_FILE, ONNX, PLAN, CONFIG = "engine.json", "model.onnx", "model.plan", "config.pbtxt"
TENSORRT, ONE_PROFILE, ONNXRUNTIME, PYTHON = "tensorrt", "tensorrt_one_profile", "onnxruntime", "python"  # files of configs/
TRTEXEC = ("trtexec", "/usr/src/tensorrt/bin/trtexec", "/opt/tensorrt/bin/trtexec")
WORKSPACE_BYTES = 1 << 30
BUILD_TIMEOUT_S = 1800
REFUSED, UNUSABLE = 3, 2  # exit codes: no engine for a version; repository missing or not writable
MAJOR, MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*


class NoEngine(Exception):
    """No engine can be built or loaded here; the message gives the reason. The caller falls back to ONNX Runtime."""


# --- the machine -------------------------------------------------------------------------------------------------------------


def find_gpu_architecture() -> str:
    """Return for example "sm_90". Raises NoEngine without a driver, without a GPU, or with GPUs of several architectures."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise NoEngine(f"there is no NVIDIA driver ({error})") from error
    count = ctypes.c_int()
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        raise NoEngine("the NVIDIA driver finds no GPU; start the container with --gpus")
    names = {
        f"sm_{_read_attribute(cuda, device, MAJOR)}{_read_attribute(cuda, device, MINOR)}" for device in range(count.value)
    }
    if len(names) > 1:
        raise NoEngine(f"the GPUs are of several architectures ({', '.join(sorted(names))}); choose with CUDA_VISIBLE_DEVICES")
    return names.pop()


def _read_attribute(cuda: ctypes.CDLL, device: int, attribute: int) -> int:
    value, handle = ctypes.c_int(), ctypes.c_int()
    if cuda.cuDeviceGet(ctypes.byref(handle), device) or cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, handle):
        raise NoEngine(f"the NVIDIA driver does not describe GPU {device}")
    return value.value


def find_builder(version: int | None) -> PythonBuilder | TrtexecBuilder:
    """Return TensorRT's Python module where it is installed, else trtexec. Raises NoEngine.

    version: tritonserver's version, as `find_served_version` returns it; builders of other versions are passed over.
    """
    others = []
    try:
        import tensorrt
    except Exception as error:  # a module that fails to load raises many types
        reason = str(error)
    else:
        number = encode_version(tensorrt.__version__)
        if version in (None, number):
            return PythonBuilder(tensorrt)
        others.append(f"the Python module is {number}")
    for path in filter(None, map(shutil.which, TRTEXEC)):
        builder = TrtexecBuilder(path)
        if version in (None, builder.number):
            return builder
        others.append(f"{path} is {builder.number}")
    if others:
        raise NoEngine(f"tritonserver loads TensorRT {version} and no engine of another version, but {', '.join(others)}")
    raise NoEngine(f"there is neither TensorRT's Python module ({reason}) nor trtexec")


def find_served_version(backends: Path) -> int | None:
    """Return the version of the TensorRT that tritonserver loads, as TensorRT counts: 8603 is 8.6.3, 101303 is 10.13.3.

    None where there is no backend, or its TensorRT does not load.
    """
    backend = backends / "tensorrt" / "libtriton_tensorrt.so"
    match = re.search(rb"libnvinfer\.so\.\d+", backend.read_bytes()) if backend.is_file() else None
    try:
        return int(ctypes.CDLL(match.group().decode()).getInferLibVersion()) if match else None
    except OSError:
        return None


def encode_version(text: str) -> int:
    """Return "8.6.3" as 8603 and "10.13.3.9" as 101303, as TensorRT's libraries and trtexec count."""
    major, minor, patch = (int(part) for part in re.findall(r"\d+", text)[:3])
    return (major * 1000 if major < 10 else major * 10_000) + minor * 100 + patch


# --- two ways to build ------------------------------------------------------------------------------------------------------


class PythonBuilder:
    """TensorRT by its Python module. 8.6: precision by flags and constraints; 10 and 11: the types in the ONNX file decide."""

    one_profile = False

    def __init__(self, trt) -> None:
        self.trt = trt
        self.version = trt.__version__
        self.logger = trt.Logger(trt.Logger.WARNING)

    def build(self, onnx: Path, engine: dict, plan: Path) -> None:
        """Build a plan. Raises NoEngine with the messages of parser and builder."""
        trt = self.trt
        builder = trt.Builder(self.logger)
        network = builder.create_network(self._find_creation_flags())
        parser = trt.OnnxParser(network, self.logger)
        if not parser.parse(onnx.read_bytes(), str(onnx)):
            errors = "; ".join(str(parser.get_error(index)) for index in range(parser.num_errors))
            raise NoEngine(f"TensorRT {self.version} cannot read {onnx}: {errors}")
        config = builder.create_builder_config()
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, WORKSPACE_BYTES)
        config.clear_flag(trt.BuilderFlag.TF32)  # on by default; fp32 scores would differ in the fourth digit
        if not self.strongly_typed:
            self._constrain(network, config, engine)
        for number, shapes in enumerate(engine["profiles"]):
            profile = builder.create_optimization_profile()
            for name, (smallest, usual, largest) in shapes.items():
                profile.set_shape(name, tuple(smallest), tuple(usual), tuple(largest))
            if config.add_optimization_profile(profile) < 0:
                raise NoEngine(f"TensorRT {self.version} refuses profile {number}: {shapes}")
        serialized = builder.build_serialized_network(network, config)
        if serialized is None:
            raise NoEngine(f"TensorRT {self.version} could not build an engine; its log above says why")
        plan.write_bytes(serialized)

    def check(self, plan: Path, engine: dict) -> None:
        """Raise NoEngine unless the plan loads here and accepts the inputs it was built for."""
        runtime = self.trt.Runtime(self.logger)
        loaded = runtime.deserialize_cuda_engine(plan.read_bytes())
        if loaded is None:
            raise NoEngine(f"TensorRT {self.version} does not load {plan}")
        names = [loaded.get_tensor_name(index) for index in range(loaded.num_io_tensors)]
        inputs = {name for name in names if loaded.get_tensor_mode(name) == self.trt.TensorIOMode.INPUT}
        if inputs != set(engine["profiles"][0]):
            raise NoEngine(f"{plan} takes the inputs {sorted(inputs)}, expected {sorted(engine['profiles'][0])}")
        if loaded.num_optimization_profiles != len(engine["profiles"]):
            raise NoEngine(f"{plan} has {loaded.num_optimization_profiles} profiles, expected {len(engine['profiles'])}")

    @property
    def strongly_typed(self) -> bool:
        return hasattr(self.trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED")

    def _find_creation_flags(self) -> int:
        """Return the network flags, by name: STRONGLY_TYPED is 1 in TensorRT 10 and 0 in 11, which lacks EXPLICIT_BATCH."""
        flags = self.trt.NetworkDefinitionCreationFlag
        flag_names = [name for name in ("EXPLICIT_BATCH", "STRONGLY_TYPED") if hasattr(flags, name)]
        return sum(1 << int(getattr(flags, name)) for name in flag_names)

    def _constrain(self, network, config, engine: dict) -> None:
        """Allow the lower precision in TensorRT 8, except in the layers that the export keeps in fp32."""
        trt = self.trt
        for flag in list_weak_flags(engine["precision"]):
            config.set_flag(getattr(trt.BuilderFlag, flag.upper()))
        if not engine["fp32_nodes"]:
            return
        config.set_flag(trt.BuilderFlag.OBEY_PRECISION_CONSTRAINTS)
        fp32_nodes = set(engine["fp32_nodes"])
        for layer in (network.get_layer(index) for index in range(network.num_layers)):
            if layer.name in fp32_nodes:
                layer.precision = trt.float32
                for output in range(layer.num_outputs):
                    if layer.get_output(output).dtype in (trt.float32, trt.float16):
                        layer.set_output_type(output, trt.float32)


class TrtexecBuilder:
    """TensorRT by its command line, with the options that its help lists. trtexec of 8.6 supports only one profile."""

    def __init__(self, path: str) -> None:
        self.path = path
        run = subprocess.run([path, "--help"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.help = run.stdout
        banner = re.search(r"TensorRT v(\d+)", self.help)
        if not banner:
            raise NoEngine(f"{path} does not start: {self.help.strip()[-300:] or run.returncode}")
        self.number = int(banner.group(1))
        self.version = f"trtexec {self.number}"

    @property
    def one_profile(self) -> bool:
        return "--profile=" not in self.help

    def make_command(self, onnx: Path, engine: dict, plan: Path) -> list[str]:
        workspace = f"--memPoolSize=workspace:{WORKSPACE_BYTES >> 20}"  # in MiB
        command = [self.path, f"--onnx={onnx}", f"--saveEngine={plan}", "--skipInference", "--noTF32", workspace]
        if "--stronglyTyped" in self.help:
            command.append("--stronglyTyped")
        else:
            command += [f"--{flag}" for flag in list_weak_flags(engine["precision"])]
            if engine["fp32_nodes"]:
                command += [
                    "--precisionConstraints=obey",
                    "--layerPrecisions=" + ",".join(f"{n}:fp32" for n in engine["fp32_nodes"]),
                ]
        profiles = engine["profiles"][-1:] if self.one_profile else engine["profiles"]
        for number, shapes in enumerate(profiles):
            command += [] if self.one_profile else [f"--profile={number}"]
            for position, option in enumerate(("minShapes", "optShapes", "maxShapes")):
                spec = ",".join(f"{name}:{'x'.join(map(str, spans[position]))}" for name, spans in shapes.items())
                command.append(f"--{option}={spec}")
        return command

    def build(self, onnx: Path, engine: dict, plan: Path) -> None:
        run = subprocess.run(self.make_command(onnx, engine, plan), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if run.returncode or not plan.is_file():
            raise NoEngine(f"{self.path} ended with {run.returncode}: {run.stdout.strip()[-600:]}")

    def check(self, plan: Path, engine: dict) -> None:
        """Raise NoEngine unless trtexec loads the plan."""
        command = [self.path, f"--loadEngine={plan}", "--skipInference"]
        run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if run.returncode:
            raise NoEngine(f"{self.path} does not load {plan}: {run.stdout.strip()[-300:]}")


def list_weak_flags(precision: str) -> list[str]:
    """Return the flags that allow TensorRT 8 the precisions of the ONNX file, for example "fp16"."""
    return [flag for flag in ("fp16", "int8") if flag in precision]


# --- cache ------------------------------------------------------------------------------------------------------------------


def compute_cache_key(onnx: Path, engine: dict, version: str, architecture: str) -> str:
    """Return the name in the cache of the engine that was built from exactly these."""
    facts = {
        "onnx": compute_sha256(onnx),
        "tensorrt": version,
        "gpu": architecture,
        "precision": engine["precision"],
        "fp32_nodes": engine["fp32_nodes"],
        "profiles": engine["profiles"],
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def find_or_build_plan(builder, cache: Path, key: str, onnx: Path, engine: dict, suffix: str) -> Path:
    """Return a plan that loads here, built only if the cache has no usable one. Raises NoEngine.

    suffix: of the unfinished plan's name
    """
    plan, digest = cache / f"{key}.plan", cache / f"{key}.sha256"
    if plan.is_file() and digest.is_file() and digest.read_text() == compute_sha256(plan):
        try:
            builder.check(plan, engine)
            return plan
        except NoEngine as error:
            warn(f"{error}; it is built again")
    cache.mkdir(parents=True, exist_ok=True)
    unfinished = cache / f".{key}.{suffix}"
    try:
        builder.build(onnx, engine, unfinished)
        builder.check(unfinished, engine)
        digest.write_text(compute_sha256(unfinished))
        unfinished.replace(plan)
    finally:
        if unfinished.exists():
            unfinished.unlink()
    return plan


def compute_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


# --- the repository ---------------------------------------------------------------------------------------------------------


def build_version(version: Path, cache: Path, backends: Path, suffix: str) -> str:
    """Place model.plan in a version folder. Return the name of the config that it needs. Raises NoEngine.

    Runs in a child process. suffix: of the unfinished plan's name
    """
    engine = json.loads((version / ENGINE_FILE).read_text())
    builder = find_builder(find_served_version(backends))
    if builder.one_profile:
        engine["profiles"] = engine["profiles"][-1:]
    key = compute_cache_key(version / ONNX, engine, builder.version, find_gpu_architecture())
    plan = find_or_build_plan(builder, cache, key, version / ONNX, engine, suffix)
    place(plan, version / PLAN)
    say(f"{version}: {engine['precision']} engine {key[:12]} of TensorRT {builder.version}")
    return ONE_PROFILE if builder.one_profile else TENSORRT


def build_apart(version: Path, cache: Path, backends: Path) -> str:
    """Run `build_version` in a child process. Return the config to serve with. Raises NoEngine, even if the child crashes.

    Nothing of the build is left, neither a trtexec that the child started nor an unfinished plan.
    """
    suffix = uuid.uuid4().hex
    command = [sys.executable, os.path.abspath(__file__), "--version-folder", str(version)]
    command += ["--cache", str(cache), "--backends", str(backends), "--suffix", suffix]
    try:
        output, code = run_apart(command, BUILD_TIMEOUT_S)
    finally:
        for unfinished in cache.glob(f".*.{suffix}"):
            unfinished.unlink()
    lines = output.strip().splitlines()
    if code == REFUSED and lines:
        raise NoEngine(lines[-1])
    if code or not lines:
        raise NoEngine(f"the build ended with {code}; its output is above")
    return lines[-1]


def run_apart(command: list[str], timeout_s: float) -> tuple[str, int]:
    """Run a command in a process group of its own. Return its output and exit code. Raises NoEngine on a timeout.

    Whatever is left of the group is killed, however the command ends.
    """
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as child:
        try:
            output, _ = child.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired as error:
            raise NoEngine(f"the build did not end within {timeout_s} s") from error
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
    return output, child.returncode


def serve_model(model: Path, cache: Path, backends: Path) -> str:
    """Build engines for every version of a model, or fall back. Return the name of the config that is in place now."""
    try:
        needed = {build_apart(engine.parent, cache, backends) for engine in sorted(model.glob(f"*/{ENGINE_FILE}"))}
        chosen = ONE_PROFILE if ONE_PROFILE in needed else TENSORRT
    except NoEngine as error:
        chosen = ONNXRUNTIME if (backends / ONNXRUNTIME).is_dir() else PYTHON
        warn(f"{model.name}: {error}. It is served by ONNX Runtime ({chosen} backend) instead of TensorRT")
        if chosen == PYTHON and not importlib.util.find_spec("onnxruntime"):
            warn(f"{model.name}: Python here lacks onnxruntime, which that needs: pip install onnxruntime, then start again")
    place(model / "configs" / f"{chosen}.pbtxt", model / CONFIG)
    return chosen


def place(source: Path, target: Path) -> None:
    """Copy a file atomically, by a rename, unless the target is equal.

    The copy is made outside of the model folder, which tritonserver watches.
    """
    if target.is_file() and compute_sha256(target) == compute_sha256(source):
        return
    depth = 1 if target.name == CONFIG else 2
    beside = target.parents[depth] / f".{target.parts[-1 - depth]}.{target.name}.{os.getpid()}"
    try:
        shutil.copyfile(source, beside)
        beside.replace(target)
    finally:
        beside.unlink(missing_ok=True)  # half a file, where the disk is full


def say(text: str) -> None:
    print(f"build_engines: {text}", file=sys.stderr, flush=True)


def warn(text: str) -> None:
    say(f"WARNING: {text}.")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repository", type=Path, help="the model repository")
    parser.add_argument("--cache", type=Path, required=True, help="folder that keeps engines between starts")
    parser.add_argument("--backends", type=Path, default=Path("/opt/tritonserver/backends"), help="tritonserver's backends")
    parser.add_argument(
        "--version-folder", type=Path, help="only this <model>/<generation>; the last line tells its configuration"
    )
    parser.add_argument("--suffix", default=str(os.getpid()), help="of an unfinished plan's name in the cache")
    arguments = parser.parse_args()
    if arguments.version_folder:
        try:
            print(build_version(arguments.version_folder, arguments.cache, arguments.backends, arguments.suffix))
        except NoEngine as error:
            print(error)
            return REFUSED
        return 0
    if not arguments.repository or not arguments.repository.is_dir():
        say(f"there is no model repository at {arguments.repository}; mount it, or name another with --repository")
        return UNUSABLE
    try:
        for model in sorted({path.parents[1] for path in arguments.repository.glob(f"*/*/{ENGINE_FILE}")}):
            say(f"{model.name}: served by {serve_model(model, arguments.cache, arguments.backends)}")
    except OSError as error:
        say(f"the repository cannot be prepared: {error}. Mount it writable, as it was exported")
        return UNUSABLE
    return 0


if __name__ == "__main__":
    sys.exit(main())
