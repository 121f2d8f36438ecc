"""Chance that is the same every time: what the pretend outside services decide by."""

import hashlib
from uuid import UUID


def share(order_id: UUID, purpose: str) -> float:
    """A number in [0, 1) that is spread evenly over orders and purposes, the same every time."""
    digest = hashlib.sha256(f"{order_id} {purpose}".encode()).digest()
    return int.from_bytes(digest[:6]) / 2**48
