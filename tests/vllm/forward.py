"""A model that computes nothing: it writes bytes into KV pages that only the right tokens at the right place give.

Every token's bytes depend on all tokens before it, on the layer and on the rank, and so does the token that is sampled:
a block that does not hold exactly what its tokens give is found by the next step that attends over it.
"""

import numpy as np
import torch

MULTIPLIER = 6_364_136_223_846_793_005
INCREMENT = 1_442_695_040_888_963_407
WORD = (1 << 64) - 1


def chain_states(tokens: list[int], weights: int = 0) -> list[int]:
    """One state a token, of it and of all before it."""
    states, state = [], weights
    for token in tokens:
        state = ((state ^ (token + 1)) * MULTIPLIER + INCREMENT) & WORD
        state ^= state >> 29
        states.append(state)
    return states


class TokenStream:
    """A request's tokens: its prompt, and then what greedy decoding gives; any position can be asked for."""

    def __init__(self, prompt: list[int], weights: int, vocabulary: int) -> None:
        self.tokens = list(prompt)
        self.prompt_tokens = len(prompt)
        self.states = chain_states(self.tokens, weights)
        self._vocabulary = vocabulary

    def next_token(self, position: int) -> int:
        """What follows the token at ``position``."""
        return 10 + (self.states[position] >> 33) % (self._vocabulary - 10)

    def reach(self, end: int) -> None:
        """Generate until there are ``end`` tokens."""
        while len(self.tokens) < end:
            self.tokens.append(self.next_token(len(self.tokens) - 1))
            state = ((self.states[-1] ^ (self.tokens[-1] + 1)) * MULTIPLIER + INCREMENT) & WORD
            self.states.append(state ^ (state >> 29))


class FakeModel:
    """Writes and checks the KV pages of one rank.

    Args:
        caches: The rank's KV cache, logically (blocks, heads, tokens, content) a layer.
        rank: Makes the ranks' bytes differ.
    """

    def __init__(self, caches: dict[str, torch.Tensor], rank: int) -> None:
        # Byte views of the same memory: (blocks, heads, tokens, content bytes).
        self.pages = [cache.view(torch.uint8).numpy() for cache in caches.values()]
        self._block_tokens = self.pages[0].shape[2]
        self._rank = rank

    def _bytes_of(self, stream: TokenStream, first: int, end: int, layer: int) -> np.ndarray:
        """(tokens, heads, content) bytes of positions ``first`` to ``end``."""
        _, heads, _, content = self.pages[layer].shape
        states = np.array(stream.states[first:end], np.uint64)[:, None]
        salt = np.arange(heads * content, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        salt += np.uint64(1 + layer + 1_000 * self._rank)
        mixed = (states ^ salt) * np.uint64(MULTIPLIER)
        return (mixed >> np.uint64(56)).astype(np.uint8).reshape(end - first, heads, content)

    def write(self, stream: TokenStream, table: list[int], first: int, end: int) -> None:
        """Compute positions ``first`` to ``end``."""
        positions = np.arange(first, end)
        blocks = np.array(table)[positions // self._block_tokens]
        for layer, pages in enumerate(self.pages):
            pages[blocks, :, positions % self._block_tokens] = self._bytes_of(stream, first, end, layer)

    def wrong_positions(self, stream: TokenStream, table: list[int], end: int) -> list[int]:
        """Positions before ``end`` whose bytes are not what the tokens give."""
        positions = np.arange(end)
        blocks = np.array(table)[positions // self._block_tokens]
        right = np.ones(end, bool)
        for layer, pages in enumerate(self.pages):
            found = pages[blocks, :, positions % self._block_tokens]
            right &= (found == self._bytes_of(stream, 0, end, layer)).all(axis=(1, 2))
        return np.flatnonzero(~right).tolist()

    def block_bytes(self, stream: TokenStream, index: int) -> np.ndarray:
        """What the pool holds of the stream's ``index``-th block: layer after layer, in the memory order LBHNC."""
        first = index * self._block_tokens
        parts = [
            self._bytes_of(stream, first, first + self._block_tokens, layer).transpose(1, 0, 2).ravel()
            for layer in range(len(self.pages))
        ]
        return np.concatenate(parts)
