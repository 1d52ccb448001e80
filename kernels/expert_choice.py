"""The experts of a mixture: chosen by its routers, or as recorded when the tokens were sampled (routing replay).

    chosen = the k largest of E scores of a token            the router's choice, or the recorded one
    gates  = what the model makes of the scores at chosen    softmax, sum to 1, scaling: the model's own, with gradient

A router chooses by `topk`. Here that call alone gives other indices, and the scores there. So the gate weights are
those of the trainer's router, and only the choice is that of the engine. Routers are what transformers' classes name as
the origin of their `router_logits`; whether replay computes a class is asked of a tiny instance
(trainer/models/model_form.py).

Source: routing replay, arXiv 2510.11370 (R3). Shape legend: N tokens of a pass, M layers with experts, E experts, k of
them chosen for each token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

Choose = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Of `[N, E]` scores and the `[N, k]` ids that the router chose: the values and ids of the choice that counts."""


class ExpertChoice:
    """The routers of one model. What is set for a pass holds for its recomputation in backward, too.

    Attributes:
        routers: One of each layer with experts, in order; empty for a dense model.
        differs: Of each layer of the newest replayed pass, `[N] bool`: the router would have chosen other experts.
    """

    def __init__(self, model: nn.Module) -> None:
        self.routers = routers_of(model)
        self.differs: list[Tensor] = []
        self._routes: Tensor | None = None
        self._recorded: dict[int, Tensor] | None = None
        for layer, router in enumerate(self.routers):
            vars(router)["forward"] = partial(self._route, layer, router, router.forward)

    @property
    def num_experts(self) -> int:
        """E."""
        return max(map(_num_experts, self.routers))

    def replay(self, routes: Tensor | None) -> None:
        """From the next pass on, send tokens to these experts.

        Args:
            routes: `[N, M, k] int`, −1 where none are recorded: there the router chooses. None: it does everywhere.
        """
        self._routes, self.differs = routes if self.routers else None, []
        if self._routes is not None and self._routes.shape[1] != len(self.routers):
            raise ValueError(
                f"routing replay: this model has {len(self.routers)} layers with experts, but {self._routes.shape[1]} "
                "are recorded: the engine serves another model than the trainer"
            )

    @contextmanager
    def recording(self) -> Iterator[dict[int, Tensor]]:
        """A context that collects, of each layer of a pass, the `[N, k] int64` experts that its router chose."""
        self._recorded = {}
        try:
            yield self._recorded
        finally:
            self._recorded = None

    def _route(self, layer: int, router: nn.Module, own: Callable[..., Any], *args: Any, **settings: Any) -> Any:
        if self._routes is None and self._recorded is None:
            return own(*args, **settings)
        with _Choosing(_num_experts(router), partial(self._choose, layer)):
            return own(*args, **settings)

    def _choose(self, layer: int, scores: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        if self._recorded is not None:
            self._recorded[layer] = chosen
        if self._routes is None:
            return scores.gather(-1, chosen), chosen
        recorded = self._routes[:, layer].to(chosen.dtype)
        if recorded.shape != chosen.shape:
            raise ValueError(
                f"routing replay: layer {layer} chooses {tuple(chosen.shape)} experts, but {tuple(recorded.shape)} are "
                "recorded: the engine serves another model than the trainer"
            )
        is_known = recorded[:, :1] >= 0
        used = torch.where(is_known, recorded, chosen)
        if len(self.differs) == layer:  # not again in the recomputation
            other = chosen.sort(-1).values != used.sort(-1).values
            self.differs.append(other.any(-1))
        return scores.gather(-1, used), used


class _Choosing(TorchFunctionMode):
    """Within it, the call of `topk` that chooses experts is answered by `choose`."""

    def __init__(self, num_experts: int, choose: Choose) -> None:
        super().__init__()
        self._num_experts, self._choose = num_experts, choose

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk) or args[0].shape[1:] != (self._num_experts,):
            return found  # of groups of experts, among others
        return torch.return_types.topk(self._choose(args[0], found[1]))


def routers_of(model: nn.Module) -> list[nn.Module]:
    """The modules that choose experts, in the order of their layers."""
    kinds = set()
    for module in model.modules():
        named = (getattr(module, "_can_record_outputs", None) or {}).get("router_logits") or ()
        kinds |= {
            one.target_class
            for one in (named if isinstance(named, list | tuple) else [named])
            if getattr(one, "target_class", nn.Linear) is not nn.Linear
        }
    return [module for module in model.modules() if type(module) in kinds]


def _num_experts(router: nn.Module) -> int:
    """Rows of its weight; under ZeRO-3 it is whole while the router computes."""
    named = getattr(router, "num_experts", None)
    return int(named) if named else next(len(one) for one in router.parameters() if one.dim() == 2)
