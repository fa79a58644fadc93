"""What one start leaves for the next: the manifest is read before the policy is asked, and written at the end."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from attrs import define, field

from freetoken.run.warmup import WarmupOutcome, seconds_by_phase
from freetoken.run.warmup_device import WarmupDevice
from freetoken.vocab.launch import StepPoint
from freetoken.vocab.plan import Plan
from freetoken.vocab.warmup import Known
from freetoken.warmup.compile_worker import default_workers
from freetoken.warmup.fingerprint import Fingerprint, take_fingerprint
from freetoken.warmup.launch_space import DeclaredLaunchSpace
from freetoken.warmup.manifest import LateNote, Manifest, ManifestStore, now
from freetoken.warmup.survey import Survey, made_survey, remember, survey
from freetoken.warmup.survey_worker import survey_in_children
from freetoken.warmup.triton_cache import cache_folder, on_disk, relocate_if_moved

_log = logging.getLogger("freetoken.warmup")

FEWEST_CHILDREN = 4
"""With fewer cores, starting processes costs more than walking the launch space in this one."""


@define
class WarmupMemory:
    """One start's view of the cache folder. ``plugins`` are the active ones: version and module, by name."""

    cache_dir: Path
    plugins: Mapping[str, tuple[str, str]] = field(factory=dict)
    fingerprint: Fingerprint | None = None
    manifest: Manifest | None = None

    def recall(self, plan: Plan, space: DeclaredLaunchSpace) -> Known:
        """What is known of ``plan`` here; the survey comes from the manifest, or is made once somebody asks."""
        moved = relocate_if_moved(cache_folder())
        if moved:
            _log.info("warmup: %s had been moved; %d kernels were found again", cache_folder(), moved)
        self.fingerprint = take_fingerprint(plan, self.plugins)
        found = ManifestStore(self.cache_dir).find(plan.served_name, self.fingerprint)
        self.manifest = found.manifest
        if found.manifest is None:
            _log.info("warmup: %s", found.because)
            remember(space, lambda: _survey(plan, space))
            return Known(because=found.because)
        if found.manifest.survey is not None:
            remember(space, found.manifest.survey)
        return found.manifest.known(on_disk(found.manifest.compiled.values()))

    def write(self, plan: Plan, space: DeclaredLaunchSpace, outcome: WarmupOutcome, device: WarmupDevice) -> None:
        """After a successful start. A folder that cannot be written costs the next start its time, not this one."""
        assert self.fingerprint is not None, "recall comes first"
        before = self.manifest
        compiled = dict(before.compiled) if before is not None else {}
        compiled.update({key: device.hashes.get(key, "") for key in outcome.keys})
        self.manifest = Manifest(
            fingerprint=self.fingerprint,
            model=plan.served_name,
            written=now(),
            survey=made_survey(space),
            compiled=compiled,
            proven=outcome.done == len(outcome.steps),
            late=before.late if before is not None else (),
            seconds={**seconds_by_phase(outcome), "waited": outcome.waited_seconds},
            kernel_seconds=device.kernel_seconds() or (dict(before.kernel_seconds) if before is not None else {}),
            certificate=before.certificate if before is not None else None,
        )
        try:
            ManifestStore(self.cache_dir).write(self.manifest)
        except OSError as error:
            _log.warning("warmup: no manifest was left for the next start: %s", error)

    def late(self, point: StepPoint, events: tuple[str, ...]) -> None:
        """Production met something: the next start shall cover it."""
        if self.manifest is None:
            return
        try:
            self.manifest = ManifestStore(self.cache_dir).add_late(self.manifest, LateNote(point, events))
        except OSError as error:
            _log.warning("warmup: a late event was not written down: %s", error)


def _survey(plan: Plan, space: DeclaredLaunchSpace) -> Survey:
    workers = default_workers(plan.hardware.cores, plan.hardware.host_free_bytes)
    return survey_in_children(space, workers) if workers >= FEWEST_CHILDREN else survey(space)
