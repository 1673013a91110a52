"""The cpu profile: publish the four staged stages beside the repository's older generations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from export.tables import PS_FILE, check_tables
from repository.checks import check
from repository.checks.check import Check
from repository.checks.finding import Finding
from repository.triton.config import LAYOUTS
from repository.triton.models import refuse_unservable_path
from server.start.environment import RUN_DIR
from serving.contract.artifacts import find_stage_folder
from serving.contract.generations import read_pinned_generation
from serving.stages.rank import TABLES_FOLDER

if TYPE_CHECKING:
    from export.profiles import Rehearsed
    from export.settings import Settings
    from repository.publish import Staging
    from serving.contract.tensors import ModelSpec


class CpuProfile:
    """The cpu profile; see `export/profiles.py`."""

    layouts = LAYOUTS
    serves_sequences = True
    own_model = None
    stays_writable = False

    def keeps_workflow(self, settings: Settings) -> bool:
        return False  # the compiled plan serves

    def refuse_early(self, repository: Path, staging: Staging, specs: dict[str, ModelSpec], settings: Settings) -> None:
        staging.check_contract(specs)

    def publish(self, rehearsed: Rehearsed, report: Callable[[str], None]) -> int:
        from export.steps.rehearsal import make_warmup_tensors  # imported late, because `make check` needs no pandas

        staging, recorded = rehearsed.staging, rehearsed.recorded
        return staging.publish(rehearsed.specs, rehearsed.settings.merge_serving(), make_warmup_tensors(staging, recorded))

    def list_checks(self) -> tuple[Sequence[Check], Sequence[Check]]:
        return CHECKS, DECISIVE

    def list_checked_by_format(self, repository: Path) -> Sequence[str]:
        return ()


PROFILE = CpuProfile()


def check_run_folder(repository: Path) -> Iterator[Finding]:
    """Check the path of this checkout's run folder, the working directory of servers. Raises ConfigError."""
    refuse_unservable_path(RUN_DIR)
    yield from ()


def check_ranker_tables(repository: Path) -> Iterator[Finding]:
    """Check that NVIDIA's parsers can read the ranker's ps.json, and that it agrees with levels.json."""
    generation = read_pinned_generation(repository)
    folder = find_stage_folder(repository, "rank", generation) / TABLES_FOLDER
    if not (folder / PS_FILE).exists():  # without levels: the tables are served whole from memory
        return
    for finding in check_tables(folder):
        where = f"rank/{generation}/{TABLES_FOLDER}/{finding.where}"
        yield replace(finding, where=where, fact=f"It {finding.fact}")


CHECKS = (
    check.check_layout,
    check.check_path,
    check.check_writers,
    check_run_folder,
    check.check_edges,
    check.check_versions,
    check.check_other_generations,
    check.check_record,
    check.check_libraries,
    check.check_warmup,
    check.check_batching,
    check.check_response_cache,
    check.check_stages,
    check_ranker_tables,
    check.check_answers,
)
DECISIVE = (check.check_layout, check.check_versions, check.check_stages)
