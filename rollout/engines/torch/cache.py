"""The torch engine's KV cache: one slot per running request, handed to the HF model as `past_key_values`.

Shape legend: n rows of a pass, q new tokens per row, S allocated slots, K kv heads, C cached positions, D head dim.
"""

from __future__ import annotations

import torch


class SlotCache:
    """Keys and values of every slot and layer.

    It grows by doubling, so short runs stay small. Unused positions hold zeros or old values, which are finite; masks
    exclude them from every result.

    Attributes:
        keys: One `[S, K, C, D]` tensor per layer; `values` likewise.
    """

    def __init__(self, num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: str) -> None:
        empty = torch.zeros(0, num_kv_heads, 0, head_dim, dtype=dtype, device=device)
        self.keys = [empty] * num_layers
        self.values = [empty] * num_layers
        self._rows = slice(0, 0)
        self._slots = torch.zeros(0, 1, dtype=torch.long, device=device)
        self._positions = torch.zeros(0, 0, dtype=torch.long, device=device)
        self._length = 0

    def reserve(self, num_slots: int, length: int) -> None:
        """Grow to at least `num_slots` slots of `length` positions; cached values stay."""
        slots, _, positions, _ = self.keys[0].shape
        if num_slots <= slots and length <= positions:
            return
        new_slots = slots if num_slots <= slots else max(num_slots, 2 * slots)
        new_positions = positions if length <= positions else max(length, 2 * positions)
        self.keys = [_grown(tensor, new_slots, new_positions) for tensor in self.keys]
        self.values = [_grown(tensor, new_slots, new_positions) for tensor in self.values]

    def aim(self, first_slot: int, positions: torch.Tensor, length: int) -> None:
        """Set where the next forward pass writes and how far it reads.

        Args:
            first_slot: Row i of the pass is slot `first_slot + i`.
            positions: `[n, q] int64`, one per new token.
            length: Attention sees positions 0..length-1.
        """
        num_rows = positions.shape[0]
        self._rows = slice(first_slot, first_slot + num_rows)
        self._slots = torch.arange(first_slot, first_slot + num_rows, device=positions.device)[:, None]
        self._positions, self._length = positions, length

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_args: object, **_kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new `[n, K, q, D]` keys and values; return the `[n, K, length, D]` ones that attention reads."""
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        keys[self._slots, :, self._positions] = key.transpose(1, 2)
        values[self._slots, :, self._positions] = value.transpose(1, 2)
        return keys[self._rows, :, : self._length], values[self._rows, :, : self._length]

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of slot `source` over slot `target`."""
        for tensor in (*self.keys, *self.values):
            tensor[target, :, :length] = tensor[source, :, :length]

    def clear(self) -> None:
        """Free the memory."""
        self.keys = [tensor.new_zeros(0, tensor.shape[1], 0, tensor.shape[3]) for tensor in self.keys]
        self.values = [tensor.new_zeros(0, tensor.shape[1], 0, tensor.shape[3]) for tensor in self.values]


def _grown(tensor: torch.Tensor, num_slots: int, length: int) -> torch.Tensor:
    grown = tensor.new_zeros(num_slots, tensor.shape[1], length, tensor.shape[3])
    grown[: tensor.shape[0], :, : tensor.shape[2]] = tensor
    return grown
