"""Real processes for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from process.cluster import Cluster

from headrace.model.demo import ensure_demo


@pytest.fixture(scope="session")
def demo_checkpoint() -> Path:
    """The bundled demo checkpoint, made once for this user."""
    return ensure_demo()


@pytest.fixture(scope="session")
def pair(demo_checkpoint: Path) -> Iterator[Cluster]:
    """One prefill and one decode worker behind a router, with gRPC; shared by the tests that leave it as it was."""
    with Cluster(demo_checkpoint, "--served-model-name", "demo", grpc=True) as cluster:
        cluster.wait_ready()
        yield cluster
        if cluster.process.poll() is not None:
            print(cluster.log())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """A failed test that used a cluster shows what its processes said."""
    report = yield
    cluster = getattr(item, "funcargs", {}).get("pair")
    if report.failed and cluster is not None:
        report.sections.append(("cluster", cluster.log()))
    return report
