"""Compiled once for all device tests: a runner and the dense model beside it."""

import pytest

from jaxkv.device.runner import Runner
from tests import tiny
from tests.device import stage
from tests.device.dense import Dense


@pytest.fixture(scope="session")
def runner() -> Runner:
    """Shared: `poison` (or `Stage`) empties it. `Runner` keeps nothing else between steps."""
    return stage.make_runner()


@pytest.fixture(scope="session")
def runner_on_two() -> Runner:
    """The same model split over two devices."""
    return stage.make_runner(tensor=2)


@pytest.fixture(scope="session")
def dense() -> Dense:
    return Dense(tiny.model(stage.MODEL), stage.MAX_LEN)
