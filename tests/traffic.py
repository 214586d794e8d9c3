"""Engines that use a pool as real ones do, for as long as somebody looks at it."""

import itertools
import random
import threading
from dataclasses import dataclass, field
from typing import Self

import numpy as np

import kvpool
from kvpool.core.keys import chain_hashes

BLOCK_TOKENS = 16
PAUSE_S = 0.02


@dataclass(frozen=True)
class Engine:
    """One engine: its namespace, how it reaches nodes, and how much its prompts share."""

    model: str
    block_bytes: int
    transport: str = "shm"
    tenant: str = "default"
    prompts: int = 3
    """System prompts, shared by conversations."""
    prompt_blocks: int = 48
    turn_blocks: int = 12
    turns: int = 6
    conversations: int = 24
    extra: dict[str, str] = field(default_factory=dict)


class Traffic:
    """Runs engines, a thread each, in a ``with`` statement; ``failed`` has what went wrong."""

    def __init__(self, uri: str, engines: list[Engine], seed: int = 1) -> None:
        self._uri = uri
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(e, seed + i)) for i, e in enumerate(engines)]
        self.failed: list[BaseException] = []
        self.loaded_blocks = 0

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def _run(self, engine: Engine, seed: int) -> None:
        try:
            with kvpool.connect(self._uri, transports=[engine.transport]) as pool:
                self._converse(pool, engine, random.Random(seed))
        except BaseException as error:
            self.failed.append(error)
            raise

    def _converse(self, pool: kvpool.Client, engine: Engine, chance: random.Random) -> None:
        namespace = kvpool.Namespace(
            model=engine.model,
            block_tokens=BLOCK_TOKENS,
            block_bytes=engine.block_bytes,
            tenant=engine.tenant,
            kv_dtype="bfloat16",
            extra=engine.extra,
        )
        blocks = pool.namespace(namespace)
        longest = engine.prompt_blocks + engine.turns * engine.turn_blocks
        computed = np.full((longest, engine.block_bytes), 7, np.uint8)
        loaded = np.zeros_like(computed)
        for turn in itertools.count():
            hashes = chain_hashes(self._prompt(engine, chance, turn), block_tokens=BLOCK_TOKENS)
            matched = blocks.match(hashes, lease_s=2)
            found = blocks.load(hashes[: matched.blocks], loaded[: matched.blocks]).loaded if matched.blocks else 0
            blocks.store(hashes, computed[: len(hashes)])
            blocks.release(matched)
            self.loaded_blocks += found
            if self._stopping.wait(PAUSE_S):
                return

    def _prompt(self, engine: Engine, chance: random.Random, turn: int) -> list[int]:
        """A shared system prompt, the most popular ones most often, and some turns of a conversation that goes on."""
        prompt = min(chance.randrange(engine.prompts), chance.randrange(engine.prompts))
        conversation = chance.randrange(engine.conversations) + turn // 200 * engine.conversations
        turns = 1 + chance.randrange(engine.turns)
        head = [prompt * 1_000 + i for i in range(engine.prompt_blocks * BLOCK_TOKENS)]
        tail = [
            100_000 + conversation * 10_000 + prompt * 100 + i for i in range(turns * engine.turn_blocks * BLOCK_TOKENS)
        ]
        return head + tail


ENGINES = [
    Engine("meta-llama/Llama-3.1-70B-Instruct", 256 << 10),
    Engine("meta-llama/Llama-3.1-70B-Instruct", 256 << 10, transport="tcp"),
    Engine("Qwen/Qwen3-32B", 128 << 10, tenant="research", prompts=2),
    Engine("mistralai/Mistral-Small-3.2-24B", 64 << 10, transport="tcp", tenant="chat", prompts=4, turns=9),
]
