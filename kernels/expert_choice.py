"""The experts of a mixture: chosen by its routers, or as recorded when the tokens were sampled (routing replay).

    chosen = the k largest of E scores of a token            the router's choice, or the recorded one
    gates  = what the model makes of the scores at chosen    softmax, sum to 1, scaling: the model's own, with gradient

A router chooses by `topk`. Here that call alone gives other indices, and the scores there. So the gate weights are
those of the trainer's router, and only the choice is that of the engine. Routers are what transformers' classes name as
the origin of their `router_logits`; whether replay computes a class is asked of a tiny instance
(trainer/models/model_form.py).

Sources: routing replay, arXiv 2510.11370 (R3); balance loss, arXiv 2101.03961 (Switch). Shape legend: N tokens of a
pass, M layers with experts, E experts, k of them chosen for each token.
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
        is_balanced: Keep of each pass what `balance_loss` needs.
    """

    def __init__(self, model: nn.Module) -> None:
        self.routers = routers_of(model)
        self._places_of_logits = router_kinds(model)
        self._sizes = [_num_experts(router) for router in self.routers]
        self._is_installed = False
        self.differs: list[Tensor] = []
        self.is_balanced = False
        self._scores: list[Tensor] = []
        self._used: list[Tensor] = []
        self._routes: Tensor | None = None
        self._recorded: dict[int, Tensor] | None = None

    @property
    def num_experts(self) -> int:
        """E."""
        return max(self._sizes)

    def replay(self, routes: Tensor | None) -> None:
        """From the next pass on, send tokens to these experts.

        Args:
            routes: `[N, M, k] int`, −1 where none are recorded: there the router chooses. None: it does everywhere.
        """
        if routes is not None or self.is_balanced:
            self._install()
        self._routes, self.differs = routes if self.routers else None, []
        self._scores, self._used = [], []
        if self._routes is not None and self._routes.shape[1] != len(self.routers):
            raise ValueError(
                f"routing replay: this model has {len(self.routers)} layers with experts, but {self._routes.shape[1]} "
                "are recorded: the engine serves another model than the trainer"
            )

    @contextmanager
    def recording(self) -> Iterator[dict[int, Tensor]]:
        """A context that collects, of each layer of a pass, the `[N, k] int64` experts that its router chose."""
        self._install()
        self._recorded = {}
        try:
            yield self._recorded
        finally:
            self._recorded = None

    def _install(self) -> None:
        """Let the routers ask. Not before there is something to ask: each layer is then compiled by itself."""
        if not self._is_installed:
            for layer, router in enumerate(self.routers):
                vars(router)["forward"] = partial(self._route, layer, router, router.forward)
        self._is_installed = True

    def _route(self, layer: int, router: nn.Module, own: Callable[..., Any], *args: Any, **settings: Any) -> Any:
        if self._routes is None and self._recorded is None and not self.is_balanced:
            return own(*args, **settings)
        with _Choosing(self._sizes[layer], partial(self._choose, layer)):
            output = own(*args, **settings)
        if self.is_balanced and len(self._scores) == layer:  # not again in the recomputation
            self._scores.append(output[self._places_of_logits[type(router)]])
        return output

    def balance_loss(self, places: Tensor) -> Tensor:
        """E · Σ_e f_e · P_e of the newest pass, mean over the layers; k if the load is even, and more if it is not.

        f_e is the number of tokens that expert e has, P_e the sum of its softmax probabilities, both over the number of
        tokens. Only P has a gradient.

        Args:
            places: `[K] int64`, the tokens that count.
        """
        losses = []
        for scores, used in zip(self._scores, self._used, strict=True):
            num_experts = scores.shape[-1]
            counts = torch.bincount(used[places].flatten(), minlength=num_experts)
            given = scores[places].float()
            is_softmax = bool((given >= 0).all() and (given.sum(-1) - 1).abs().max() < 1e-3)  # some routers return that
            probabilities = (given if is_softmax else given.softmax(-1)).mean(0)
            losses.append(num_experts * (counts / len(places) * probabilities).sum())
        return torch.stack(losses).mean()

    def _choose(self, layer: int, scores: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        if self._recorded is not None:
            self._recorded[layer] = chosen
        used = chosen if self._routes is None else self._replayed(layer, self._routes, chosen)
        if self.is_balanced and len(self._used) == layer:
            self._used.append(used)
        return scores.gather(-1, used), used

    def _replayed(self, layer: int, routes: Tensor, chosen: Tensor) -> Tensor:
        recorded = routes[:, layer].to(chosen.dtype)
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
        return used


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
    kinds = router_kinds(model)
    return [module for module in model.modules() if type(module) in kinds]


def router_kinds(model: nn.Module) -> dict[type[nn.Module], int]:
    """The classes of routers, and which of their outputs the scores before softmax are."""
    kinds = {}
    for module in model.modules():
        named = (getattr(module, "_can_record_outputs", None) or {}).get("router_logits") or ()
        for one in named if isinstance(named, list | tuple) else [named]:
            if getattr(one, "target_class", nn.Linear) is not nn.Linear:
                kinds[one.target_class] = one.index
    return kinds


def _num_experts(router: nn.Module) -> int:
    """As it says, or the rows of its weight, of which ZeRO-3 may have left the shape only."""
    named = getattr(router, "num_experts", None)
    shapes = (getattr(one, "ds_shape", one.shape) for one in router.parameters())
    return int(named) if named else next(shape[0] for shape in shapes if len(shape) == 2)
