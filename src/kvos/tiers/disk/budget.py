"""One budget for all folders of a home: each model and shape of blocks has its own folder."""

from __future__ import annotations

import logging
from pathlib import Path

from kvos.errors import InvalidConfigError
from kvos.tiers.disk.survey import FolderSurvey, survey_folder
from kvos.tiers.disk.upkeep import FolderUpkeep, locked_folder

__all__ = ["capacity_beside"]

_logger = logging.getLogger(__name__)


def capacity_beside(others: Path, mine: str, budget_bytes: int) -> int:
    """What is left of the budget for the folder ``mine`` in ``others``, beside the folders there.

    The others may take half together: beyond that, those not written for longest are cleared whole, except those
    that a running process has open. At least half of the budget is returned, also if those take more.
    """
    half = budget_bytes // 2
    found = sorted(_surveys(others, mine), key=lambda one: one[1].newest or 0.0)
    total = sum(survey.used_bytes for _, survey in found)
    for folder, survey in found:
        if total <= half:
            break
        if _clear(folder):
            total -= survey.used_bytes
    return max(budget_bytes - total, budget_bytes - half)


def _surveys(others: Path, mine: str) -> list[tuple[Path, FolderSurvey]]:
    surveys = []
    try:
        folders = [path for path in others.iterdir() if path.is_dir() and path.name != mine]
    except OSError:  # there is none yet
        return []
    for folder in folders:
        try:
            surveys.append((folder, survey_folder(folder)))
        except OSError as error:
            _logger.warning("the disk cache %s cannot be looked at, and does not count: %s", folder, error)
    return [(folder, survey) for folder, survey in surveys if survey.packs]


def _clear(folder: Path) -> bool:
    try:
        with locked_folder(folder):
            FolderUpkeep(folder).clear()
    except InvalidConfigError:  # somebody uses it
        return False
    except OSError as error:
        _logger.warning("the disk cache %s could not be cleared for want of room: %s", folder, error)
        return False
    _logger.info("the disk cache %s was cleared for want of room", folder)
    return True
