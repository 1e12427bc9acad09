"""Real processes for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from process.cluster import READY_LIMIT_S, Cluster

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


@pytest.fixture(scope="session")
def one(demo_checkpoint: Path) -> Iterator[Cluster]:
    """A worker of both phases that computes in smaller chunks than `pair`, with the same caches; shared likewise."""
    words = ("--served-model-name", "demo", "--monolithic", "--kv-dtype", "fp8", "--max-num-batched-tokens", "320")
    with Cluster(demo_checkpoint, *words) as cluster:
        cluster.wait_ready()
        yield cluster


@pytest.fixture(scope="session")
def mortals() -> Iterator[list[Cluster]]:
    """Every cluster that `mortal` has made."""
    clusters: list[Cluster] = []
    yield clusters
    for cluster in clusters:
        cluster.__exit__(None)


@pytest.fixture
def mortal(demo_checkpoint: Path, mortals: list[Cluster]) -> Cluster:
    """One pair whose processes a test may kill; found whole by the next test, or another one if all of it is gone."""
    if not mortals or mortals[-1].process.poll() is not None:
        mortals.append(Cluster(demo_checkpoint, "--served-model-name", "demo"))
        mortals[-1].wait_ready()
    mortals[-1].until(mortals[-1].is_ready, READY_LIMIT_S, "whole again")
    return mortals[-1]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """A failed test that used a cluster shows what its processes said."""
    report = yield
    for name, used in getattr(item, "funcargs", {}).items():
        if report.failed and isinstance(used, Cluster):
            report.sections.append((name, used.log()))
    return report
