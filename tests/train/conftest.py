"""Fixtures that tests of checkpoints share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxpipe.train.checkpoint import CheckpointStore
from tests.support.checkpoint_cases import save_two


@pytest.fixture
def store(tmp_path: Path) -> Iterator[CheckpointStore]:
    with CheckpointStore(tmp_path / "run", keep_last=3) as opened:
        yield opened


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Provide checkpoints of steps 10 and 20, to be copied and damaged."""
    directory = tmp_path_factory.mktemp("saved")
    save_two(directory)
    return directory
