import errno
import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import hps_config
from hps_config.__main__ import app, read_traces
from hps_config.description import BudgetSection, HpsDescription, parse_bytes, read_description
from hps_config.planning import plan_levels
from hps_config.ps_writer import build_ps_document, write_ps_json
from hps_config.reader import check_document, read_ps_json
from hps_config.report import format_bytes
from hps_config.tables import TableSpec
from serving.contract.errors import ConfigError, run_program
from serving.tables.formats.kafka import is_subscribed

DEFAULTS = Path(hps_config.__file__).parent / "defaults.toml"


def changed(tmp_path: Path, *replacements: tuple[str, str]) -> Path:
    text = DEFAULTS.read_text()
    for old, new in replacements:
        assert old in text
        text = text.replace(old, new, 1)
    path = tmp_path / "tables.toml"
    path.write_text(text)
    return path


def make_document(tmp_path: Path, *replacements: tuple[str, str]) -> dict:
    """Return the ps.json of the default description with replacements."""
    description = read_description(changed(tmp_path, *replacements))
    return build_ps_document(description, plan_levels(description.tables, description.budgets))


@pytest.mark.parametrize(
    ("text", "count"),
    [(0, 0), ("12", 12), ("1 KiB", 1024), ("1.5MiB", 1_572_864), ("2 GiB", 2**31), ("3 B", 3), ("9" * 400, int("9" * 400))],
)
def test_bytes(text, count):
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "GiB", "1 GB", "-1", "1 2", -1, True, None, 1.5])
def test_bytes_that_are_none(text):
    with pytest.raises(ValueError, match='Expected bytes as a number or as "64 MiB"'):
        parse_bytes(text)


def test_human_bytes():
    sizes = {0: "0 B", 1023: "1023 B", 1536: "1.5 KiB", 5 * 2**20: "5.0 MiB", 2**40: "1.0 TiB", 2**50: "1024.0 TiB"}
    assert [format_bytes(size) for size in sizes] == list(sizes.values())


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('l1 = "64 MiB"', 'l1 = "64 MB"', "budget.l1: is '64 MB'"),
        ('l1 = "64 MiB" ', 'l9 = "64 MiB" ', "budget.l1: Field required"),
        ("instances = 2", "instances = 0", "serving.instances: Input should be greater than or equal to 1"),
        ("instances = 2", 'instances = "2"', "serving.instances: Input should be a valid integer, got '2'"),
        ("instances = 2", "instance = 2", "serving.instance: Extra inputs are not permitted"),
        ("devices = [0]", "devices = []", "serving.devices: "),
        ("rows = 1_000_000", "rows = 0", "tables.0.rows: Input should be greater than or equal to 1, got 0"),
        ("rows = 1_000_000", "rows = true", "tables.0.rows: Input should be a valid integer, got True"),
        ("width = 16", "width = 1.5", "tables.0.width: Input should be a valid integer"),
        ('row_format = "int8"', 'row_format = "fp8"', "tables.1.row_format: Input should be 'fp32', 'fp16', 'int8' or 'int4'"),
        ('name = "item_id"', 'name = "a.b"', "table name 'a.b' is not accepted by HPS"),
        ('model = "rank"', 'model = "ra nk"', "model name 'ra nk' is not accepted"),
        ("[budget]", "[budget", "is not valid TOML"),
    ],
)
def test_descriptions_that_are_refused(tmp_path, old, new, message):
    path = changed(tmp_path, (old, new))
    with pytest.raises(ConfigError) as caught:
        read_description(path)
    assert str(path) in str(caught.value)
    assert message in str(caught.value)


def test_a_missing_description(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_description(tmp_path / "none.toml")


def test_the_written_file_satisfies_both_parsers(tmp_path):
    description = read_description(changed(tmp_path, ('brokers = ""', 'brokers = "a:9092,b:9092"')))
    plan = plan_levels(description.tables, description.budgets)
    document = build_ps_document(description, plan)
    assert check_document(document)[1] == []
    write_ps_json(tmp_path / "ps.json", description, plan)
    assert json.loads((tmp_path / "ps.json").read_text()) == document
    config = read_ps_json(tmp_path / "ps.json")
    model = config.find_model("rank")
    assert model.embedding_table_names == ("item_id", "user_id")
    assert model.sparse_files == ("./item_id.model", "./user_id.model")
    assert model.row_format_per_table == ("fp32", "int8")
    assert model.gpucacheper == plan.gpucacheper
    assert (model.exact, model.prefilled) == (True, True)
    assert (config.volatile_db.type, config.persistent_db.type, config.update_source.brokers) == (
        "parallel_hash_map",
        "rocks_db",
        "a:9092,b:9092",
    )
    for database in (config.volatile_db, config.persistent_db):
        assert is_subscribed(list(database.update_filters), "rank", "item_id")
        assert not is_subscribed(list(database.update_filters), "rank-2", "item_id")


def test_a_partial_l2_caches_what_it_missed(tmp_path):
    description = read_description(changed(tmp_path, ('l2 = "1 GiB"', 'l2 = "10 MiB"')))
    plan = plan_levels(description.tables, description.budgets)
    volatile = build_ps_document(description, plan)["volatile_db"]
    assert volatile["overflow_margin"] == plan.overflow_margin < 1_000_000
    assert (volatile["overflow_policy"], volatile["cache_missed_embeddings"]) == ("evict_oldest", True)
    left = volatile["overflow_margin"]
    while left > 0.8 * volatile["overflow_margin"]:  # resolve_overflow_ of hash_map_backend.cpp and redis_backend.cpp
        left -= volatile["max_batch_size"]
    assert left > 0.7 * volatile["overflow_margin"]


@pytest.mark.parametrize("rows", [1, 7_754, 1_000_000, 100_000_000])
@pytest.mark.parametrize("width", [1, 4, 17, 100_000])
def test_the_hash_map_takes_little_more_memory_than_its_rows(rows, width):
    """By hash_map_backend_detail.hpp: pages of `allocation_rate` bytes, in each partition, of rows at multiples of 64 bytes."""
    tables = (TableSpec(name="items", rows=rows, width=width),)
    description = HpsDescription(model="rank", budget=BudgetSection(l1=1 << 30, l2=50 << 40, l3=0), tables=tables)
    volatile = build_ps_document(description, plan_levels(description.tables, description.budgets))["volatile_db"]
    stride = -(-4 * width // 64) * 64
    per_page = volatile["allocation_rate"] // stride
    assert per_page > 0
    pages = volatile["num_partitions"] * -(-(rows // volatile["num_partitions"] + 1) // per_page)
    assert pages * volatile["allocation_rate"] <= 1.2 * rows * stride + 8 * max(65_536, stride)


def test_without_l2_or_l3(tmp_path):
    assert make_document(tmp_path, ('l2 = "1 GiB"', "l2 = 0"))["volatile_db"] == {"type": "disabled"}
    assert "persistent_db" not in make_document(tmp_path, ('l3 = "8 GiB"', "l3 = 0"))


def test_redis(tmp_path):
    volatile = make_document(tmp_path, ('type = "parallel_hash_map"', 'type = "redis_cluster"'))["volatile_db"]
    assert (volatile["type"], volatile["address"], volatile["num_node_connections"]) == ("redis_cluster", "127.0.0.1:7000", 5)


def test_settings_the_parsers_would_refuse_are_not_written(tmp_path):
    description = read_description(changed(tmp_path, ('type = "parallel_hash_map"', 'type = "multi_process_hash_map"')))
    plan = plan_levels(description.tables, description.budgets)
    with pytest.raises(ConfigError, match=r"would not be served[\s\S]*parser B[\s\S]*volatile_db.type"):
        write_ps_json(tmp_path / "ps.json", description, plan)
    assert not (tmp_path / "ps.json").exists()


def test_plan_command(tmp_path):
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "keys.npz", item_id=rng.integers(0, 1000, 500), user_id=rng.integers(0, 1000, 500))
    arguments = ["plan", str(DEFAULTS), "--trace", str(tmp_path / "keys.npz"), "--write", str(tmp_path / "ps.json")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    for said in ("item_id", "user_id", "L2 of the machine", "64.0 MiB", "predicted hit rates", "exact LRU per level"):
        assert said in result.output
    result = CliRunner().invoke(app, ["check", str(tmp_path / "ps.json")])
    assert (result.exit_code, result.output.splitlines()[-1].endswith("0 errors, 0 warnings")) == (0, True)


def test_a_plan_that_cannot_be_written_is_an_error(tmp_path):
    result = CliRunner().invoke(app, ["plan", str(DEFAULTS), "--write", str(tmp_path / "nowhere" / "ps.json")])
    assert isinstance(result.exception, ConfigError)
    assert "cannot be written" in str(result.exception)


def test_check_command_fails_on_errors(tmp_path):
    (tmp_path / "ps.json").write_text('{"models": []}')
    result = CliRunner().invoke(app, ["check", str(tmp_path / "ps.json")])
    assert result.exit_code == 1
    assert "error (parser B) supportlonglong: is missing" in result.output


def test_refusals_end_the_command_with_one_line(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("sys.argv", ["hps_config", "plan", str(tmp_path / "none.toml")])
    with pytest.raises(SystemExit) as caught:
        run_program(app)
    assert str(caught.value).startswith("error: ")
    assert "cannot be read" in str(caught.value)


def test_a_file_of_another_user_ends_the_command_with_one_line():
    def refuse():
        raise PermissionError(errno.EACCES, "Permission denied", "/srv/models/lock")

    with pytest.raises(SystemExit, match=r"^error: /srv/models/lock: permission denied"):
        run_program(refuse)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_a_disk_that_cannot_be_written_ends_the_command_with_one_line(code):
    def fail():
        raise OSError(code, "No room", "/srv/models/lock")

    with pytest.raises(SystemExit, match=r"^error: .*No room: '/srv/models/lock'\. Free space, or make the folder writable"):
        run_program(fail)


def test_traces(tmp_path):
    tables = read_description(DEFAULTS).tables
    np.save(tmp_path / "keys.npy", np.arange(3))
    assert read_traces(tmp_path / "keys.npy", tables[:1])["item_id"].tolist() == [0, 1, 2]
    with pytest.raises(ConfigError, match="one array for 2 tables"):
        read_traces(tmp_path / "keys.npy", tables)
    (tmp_path / "keys.npy").write_text("no array")
    np.savez(tmp_path / "objects.npz", item_id=np.array([{}], object))
    (tmp_path / "empty.npy").touch()
    (tmp_path / "torn.npz").write_bytes(b"PK\x03\x04")
    for name in ("keys.npy", "objects.npz", "empty.npy", "torn.npz"):
        with pytest.raises(ConfigError, match="cannot be read as a key trace"):
            read_traces(tmp_path / name, tables)
