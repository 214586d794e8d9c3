"""What the engines are asked to do: requests as chains of block hashes, and the built-in agent workload."""

import random
from collections.abc import Sequence

import msgspec

from kvpool.core.errors import UsageError
from kvpool.core.keys import NO_PARENT, chain_hashes

CONVERSATIONS_MAX = 10_000
TURNS_MAX = 1_000
PROMPT_TOKENS_MAX = 1_000_000
"""System prompt plus all turns of one conversation."""

_TOKEN_IDS = 1 << 17
"""Size of the made-up vocabulary; large enough that no two messages meet by chance."""

_LENGTH_SPREAD = (0.5, 1.5)
"""A message is this many times its mean length, drawn evenly: real turns are never equally long."""


class Request(msgspec.Struct, frozen=True):
    """One prompt.

    Attributes:
        input_tokens: Length of the prompt, its partial tail block included.
        hashes: Chained 32-byte hashes of its *full* blocks, from the root. The tail block has none: it is
            never stored.
        arrival_s: When it arrived, in seconds from the beginning of the workload; None if nobody said.
    """

    input_tokens: int
    hashes: tuple[bytes, ...]
    arrival_s: float | None = None


class Workload(msgspec.Struct, frozen=True):
    """Requests in the order in which they arrive, cut into blocks of `block_tokens`."""

    name: str
    block_tokens: int
    requests: tuple[Request, ...]

    @property
    def input_tokens(self) -> int:
        """Tokens of all prompts together."""
        return sum(request.input_tokens for request in self.requests)

    @property
    def block_references(self) -> int:
        """Full blocks of all prompts together, repeats included."""
        return sum(len(request.hashes) for request in self.requests)

    @property
    def longest_blocks(self) -> int:
        """Full blocks of the longest prompt."""
        return max((len(request.hashes) for request in self.requests), default=0)

    def unique_blocks(self) -> int:
        """Different full blocks: what an infinite cache would hold in the end."""
        return len({block for request in self.requests for block in request.hashes})


class AgentSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The built-in workload: agents with long shared system prompts, in conversations of many turns.

    Attributes:
        agents: Different system prompts (with their tool schemas), shared by the conversations in turn.
        conversations: Conversations, interleaved at random.
        turns: Calls a conversation makes; each repeats the whole conversation before it.
        system_tokens: Length of a system prompt with its tools.
        turn_tokens: Mean tokens a turn adds: the model's last answer and the tool result or question after
            it.
        block_tokens: Tokens a block covers.
        seed: Same seed, same workload.
    """

    agents: int = 4
    conversations: int = 32
    turns: int = 12
    system_tokens: int = 2_000
    turn_tokens: int = 300
    block_tokens: int = 16
    seed: int = 1

    def __post_init__(self) -> None:
        _check_range("conversations", self.conversations, CONVERSATIONS_MAX)
        _check_range("agents", self.agents, CONVERSATIONS_MAX)
        _check_range("turns", self.turns, TURNS_MAX)
        _check_range("system_tokens", self.system_tokens, PROMPT_TOKENS_MAX)
        _check_range("turn_tokens", self.turn_tokens, PROMPT_TOKENS_MAX // self.turns)
        _check_range("block_tokens", self.block_tokens, PROMPT_TOKENS_MAX)


def agent_workload(settings: AgentSettings) -> Workload:
    """Generate the conversations and interleave their turns; a conversation's turns keep their order."""
    rng = random.Random(settings.seed)  # noqa: S311 - a workload that repeats, not a secret
    systems = [_message(rng, settings.system_tokens) for _ in range(settings.agents)]
    conversations = [_conversation(rng, settings, systems[i % settings.agents]) for i in range(settings.conversations)]
    name = f"{settings.conversations} agent conversations of {settings.turns} turns, seed {settings.seed}"
    return Workload(name, settings.block_tokens, tuple(_interleave(rng, conversations)))


def _conversation(rng: random.Random, settings: AgentSettings, system: Sequence[int]) -> list[Request]:
    """The prompts of one conversation; each is the one before it plus a message."""
    requests: list[Request] = []
    hashes: list[bytes] = []
    pending = list(system)  # tokens not yet in a full block
    input_tokens = len(system)
    for _ in range(settings.turns):
        message = _message(rng, max(1, round(settings.turn_tokens * rng.uniform(*_LENGTH_SPREAD))))
        pending += message
        input_tokens += len(message)
        full = chain_hashes(pending, settings.block_tokens, hashes[-1] if hashes else NO_PARENT)
        hashes += full
        del pending[: len(full) * settings.block_tokens]
        requests.append(Request(input_tokens, tuple(hashes)))
    return requests


def _message(rng: random.Random, tokens: int) -> list[int]:
    return rng.choices(range(_TOKEN_IDS), k=tokens)


def _interleave(rng: random.Random, conversations: Sequence[Sequence[Request]]) -> list[Request]:
    """All requests, a random conversation's next turn at a time: so that turns hop between engines."""
    order = [c for c, turns in enumerate(conversations) for _ in turns]
    rng.shuffle(order)
    turns = [iter(conversation) for conversation in conversations]
    return [next(turns[c]) for c in order]


def _check_range(field: str, value: int, maximum: int) -> None:
    if not 1 <= value <= maximum:
        raise UsageError(f"workload {field} is {value}; it must be from 1 to {maximum}")
