"""A router and fake workers in one event loop, with real sockets between them and their client."""

import asyncio
import contextlib
from dataclasses import dataclass

import openai
from fake_worker import Cluster, FakeWorker, running

from headrace.config.tree import Config, ModelSection, RouterSection
from headrace.router.main import Router
from headrace.router.prefix_index import IndexState
from headrace.router.session import SessionTimes

TIMES = SessionTimes(connect_s=2.0, beat_s=0.3, first_pause_s=0.01, longest_pause_s=0.05)


@dataclass
class World:
    """What a test holds in its hands."""

    router: Router
    workers: dict[str, FakeWorker]
    cluster: Cluster
    client: openai.AsyncOpenAI

    @property
    def url(self) -> str:
        return f"http://{self.router.http_address}"

    @property
    def states(self) -> list[str]:
        """Where the sequences stand that have not ended, as the router has heard."""
        return [sequence.journey.state.value for sequence in self.router.dispatcher._alive.values()]

    async def until(self, condition, timeout_s: float = 5.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.002)


@contextlib.asynccontextmanager
async def world(checkpoint: str, roles=("prefill", "decode"), *, script=None, wait=True, key="any", **settings):
    """Router and workers, ready."""
    cluster = Cluster(**({"script": script} if script else {}))
    names = {f"{role}-{index}": role for index, role in enumerate(roles)}
    workers = {name: FakeWorker(cluster, role, name) for name, role in names.items()}
    async with running(*workers.values()):
        section = RouterSection(
            port=0, workers=tuple(worker.address for worker in workers.values()), grpc_port=0, **settings
        )
        config = Config(model=ModelSection(path=checkpoint, served_names=("tide", "tide-alias")), router=section)
        router = Router(config, times=TIMES, seed=1)
        await router.start()
        client = openai.AsyncOpenAI(base_url=f"http://{router.http_address}/v1", api_key=key, max_retries=0, timeout=20)
        made = World(router, workers, cluster, client)
        try:
            if wait:
                placement = router.dispatcher.placement
                await made.until(lambda: placement.can_serve)
                await made.until(lambda: all(worker.index.state is IndexState.EXACT for worker in placement.workers))
            yield made
        finally:
            await client.close()
            await router.stop()


def in_world(roles=("prefill", "decode"), **settings):
    """Runs an async test that takes a World; at most 30 s."""

    def decorate(test):
        def wrapper(checkpoint):
            async def body():
                async with world(checkpoint, roles, **settings) as made:
                    await asyncio.wait_for(test(made), 30)

            asyncio.run(body())

        wrapper.__name__ = test.__name__
        wrapper.__doc__ = test.__doc__
        return wrapper

    return decorate


def script_of(world_, text):
    """A script that says these words, then EOS."""
    ids = [*world_.router.edge.model.tokenizer.encode_raw(text), 1]
    return lambda prompt, sampling, index: ids[min(index, len(ids) - 1)]
