"""One tiny model for all tests of the server, and a server over it."""

from collections.abc import Iterator

import pytest

from jaxkv import LLM
from tests.serve.stage import LiveServer, load_tiny


@pytest.fixture(scope="session")
def tiny_llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return load_tiny(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def server(tiny_llm: LLM) -> Iterator[LiveServer]:
    with LiveServer(tiny_llm) as server:
        yield server


@pytest.fixture
def idle(server: LiveServer) -> Iterator[None]:
    """Nothing is left of a test's requests."""
    yield
    server.check_idle()
