"""The merlin profile as a plug-in of the export: stages in parts, laid out for NVIDIA's containers (docs/merlin.md)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from repository.checks.check import Check
from serving.contract.tensors import ENSEMBLE, STAGES
from serving.stages.parts.specs import RANK_DENSE

if TYPE_CHECKING:
    from export.profiles import Rehearsed
    from export.settings import Settings
    from repository.publish import Staging
    from serving.contract.tensors import ModelSpec


class MerlinProfile:
    """Implements `export/profiles.py`.

    Modules that write and check repositories are imported late, because they take seconds.
    """

    layouts = ("ensemble",)  # its networks are models of their own
    serves_sequences = False
    own_model = RANK_DENSE
    stays_writable = True  # the containers' start scripts build engines in it

    def keeps_workflow(self, settings: Settings) -> bool:
        return settings.merlin.preprocess == "nvtabular"

    def refuse_early(self, repository: Path, staging: Staging, specs: dict[str, ModelSpec], settings: Settings) -> None:
        from export.nvidia.publish import refuse_int8, refuse_places

        refuse_int8(settings)
        refuse_places(repository, settings)

    def publish(self, rehearsed: Rehearsed, report: Callable[[str], None]) -> int:
        from export.nvidia.publish import publish_merlin
        from export.nvidia.source import Source

        source = Source.open({name: rehearsed.staging.folder(name) for name in (*STAGES, ENSEMBLE)}, rehearsed.workflow)
        return publish_merlin(source, rehearsed.repository, rehearsed.settings, report)

    def list_checks(self) -> tuple[Sequence[Check], Sequence[Check]]:
        from export.nvidia.check import CHECKS, DECISIVE

        return CHECKS, DECISIVE

    def list_checked_by_format(self, repository: Path) -> Sequence[str]:
        from export.nvidia.check import list_unconfirmed_facts

        return list_unconfirmed_facts(repository)


PROFILE = MerlinProfile()
