"""All targets. Importing them imports what they fuzz: atheris instruments it on the way."""

from tests.fuzz import decoders, endpoints, files, orders, replies
from tests.fuzz.target import TARGETS

__all__ = ["TARGETS", "decoders", "endpoints", "files", "orders", "replies"]
