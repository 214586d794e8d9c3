"""Two engines and a pool of two nodes, each on a host of its own: what one computes the other loads, and no death or
partition changes an answer.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvpool.bench.vllm_model import BLOCK_TOKENS, DEMO_MODEL, prompt_of, write_model, write_weights
from tests.integration.conftest import Pool
from tests.netns.spaces import Network, Space, why_not
from tests.vllm.serving import Server, kv_transfer
from tests.waiting import eventually

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]

PROMPT_TOKENS = 1_280
PROMPT_BLOCKS = PROMPT_TOKENS // BLOCK_TOKENS
ANSWER_TOKENS = 16
PROMPT_BYTES = PROMPT_TOKENS * DEMO_MODEL.kv_bytes_per_token


@dataclass
class Hosts:
    """Engines a and b share the pool; engine alone has none."""

    pool: Pool
    spaces: dict[str, Space]
    engines: dict[str, Server]

    def start_node(self, name: str) -> None:
        space = self.spaces[name]
        with space.entered():
            self.pool.start_node(name, "128MiB", **_listening("node", space, self.pool.directory))

    def expected(self, prompt: list[int]) -> tuple[int, ...]:
        return self.engines["alone"].ask(prompt, ANSWER_TOKENS).tokens

    def ask(self, engine: str, prompt: list[int]):
        return self.engines[engine].ask(prompt, ANSWER_TOKENS)

    def save(self, engine: str, prompt: list[int]) -> None:
        """Have an engine compute a prompt, and wait until all of it is in the pool."""
        self.engines[engine].forget()
        before = self.saved_blocks(engine)
        self.ask(engine, prompt)
        self.engines[engine].forget()
        eventually(lambda: self.saved_blocks(engine) >= before + PROMPT_BLOCKS)

    def silences(self) -> int:
        """How often the metadata service has given a node up."""
        return (self.pool.directory / "meta.log").read_text().count("node_silent")

    def saved_blocks(self, engine: str) -> float:
        return self.engines[engine].metric("vllm:kvpool_save_blocks_total")


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    if reason := why_not():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("hosts")
    model = write_model(folder / "tiny", DEMO_MODEL)
    write_weights(model, DEMO_MODEL)
    with ExitStack() as stack:
        network = stack.enter_context(Network())
        spaces = {name: network.space(name) for name in ("meta", "n0", "n1", "a", "b")}
        engines: dict[str, Server] = {}
        transfer = kv_transfer(f"grpc://{spaces['meta'].address}:7300", transports=["tcp"])
        for name in ("a", "b"):
            address, inside = spaces[name].address, spaces[name].entered
            engines[name] = stack.enter_context(Server(model, folder / f"{name}.log", transfer, address, inside))
        engines["alone"] = stack.enter_context(Server(model, folder / "alone.log"))
        pool = Pool(folder, stack, grpc_port=7300)
        with spaces["meta"].entered():
            pool.start_meta(**_listening("meta", spaces["meta"], folder), **{"heartbeat": "0.5s", "node-ttl": "2s"})
        found = Hosts(pool, spaces, engines)
        for name in ("n0", "n1"):
            found.start_node(name)
        for engine in engines.values():
            engine.ready()
        yield found


def _listening(role: str, space: Space, folder: Path) -> dict[str, object]:
    config = folder / f"{space.name}.yaml"
    config.write_text(f"{role}: {{insecure: true, listen: {space.address}}}\n")
    return {"config": config}


def test_an_engine_loads_what_another_saved(hosts):
    prompts = [prompt_of(seed, PROMPT_TOKENS, DEMO_MODEL.vocabulary) for seed in range(1, 5)]
    expected = [hosts.expected(prompt) for prompt in prompts]
    for prompt in prompts:
        hosts.save("a", prompt)

    before = {name: hosts.spaces[name].sent_bytes() for name in ("n0", "n1")}
    answers = [hosts.ask("b", prompt) for prompt in prompts]

    assert [answer.tokens for answer in answers] == expected
    assert all(answer.cached_tokens >= PROMPT_TOKENS - BLOCK_TOKENS for answer in answers)
    sent = {name: hosts.spaces[name].sent_bytes() - before[name] for name in before}
    assert sum(sent.values()) > len(prompts) * PROMPT_BYTES
    assert min(sent.values()) > PROMPT_BYTES


def test_a_node_killed_while_it_sends_costs_time_and_no_token(hosts):
    prompts = [prompt_of(seed, PROMPT_TOKENS, DEMO_MODEL.vocabulary) for seed in (10, 11)]
    expected = [hosts.expected(prompt) for prompt in prompts]
    hosts.save("a", prompts[0])
    failures = hosts.engines["b"].metric("vllm:kvpool_load_failures_total")

    before = {name: hosts.spaces[name].sent_bytes() for name in ("n0", "n1")}
    with ExitStack() as slow, ThreadPoolExecutor(1) as asking:
        for name in before:
            slow.enter_context(hosts.spaces[name].slowed("16mbit"))
        asked = asking.submit(hosts.ask, "b", prompts[0])
        sending: list[str] = []
        while not sending:
            assert not asked.done()
            sending = [name for name in before if hosts.spaces[name].sent_bytes() > before[name] + PROMPT_BYTES // 16]
        assert not asked.done()
        hosts.pool.kill(hosts.pool.nodes[sending[0]])
        answer = asked.result()

    assert answer.tokens == expected[0]
    assert hosts.engines["b"].metric("vllm:kvpool_load_failures_total") == failures + 1
    for engine in ("a", "b"):
        assert [hosts.ask(engine, prompt).tokens for prompt in prompts] == expected
    hosts.start_node(sending[0])


def test_engines_outlive_a_partition_of_the_metadata_service(hosts):
    prompts = [prompt_of(seed, PROMPT_TOKENS, DEMO_MODEL.vocabulary) for seed in range(20, 24)]
    expected = [hosts.expected(prompt) for prompt in prompts]
    hosts.save("a", prompts[0])
    silences = hosts.silences()

    with hosts.spaces["meta"].cut_off():
        assert hosts.ask("b", prompts[1]).tokens == expected[1]
        assert hosts.ask("a", prompts[1]).tokens == expected[1]
        assert hosts.ask("b", prompts[2]).tokens == expected[2]
        eventually(lambda: hosts.silences() >= silences + len(hosts.pool.nodes))

    eventually(lambda: _forgotten_and_loaded(hosts, "b", prompts[0], expected[0]))
    hosts.save("b", prompts[3])
    eventually(lambda: _forgotten_and_loaded(hosts, "a", prompts[3], expected[3]))


def _forgotten_and_loaded(hosts: Hosts, engine: str, prompt: list[int], expected: tuple[int, ...]) -> bool:
    """Ask anew; every answer must be right, whether it was loaded or computed."""
    hosts.engines[engine].forget()
    loaded = hosts.engines[engine].metric("vllm:kvpool_load_tokens_total")
    assert hosts.ask(engine, prompt).tokens == expected
    return hosts.engines[engine].metric("vllm:kvpool_load_tokens_total") > loaded
