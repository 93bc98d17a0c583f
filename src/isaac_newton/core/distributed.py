"""Ranks and shards: whose rows count together, and which part of a gradient is here."""

import sys
import zlib
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from isaac_newton.torch_private import first_global_row

__all__ = ["Ranks", "first_row", "is_sharded", "keep_own_part", "sum_over_shards"]

_Key = TypeVar("_Key", bound=Hashable)
_Spec = TypeVar("_Spec")


class Ranks:
    """The processes whose batches form one batch. Copies share it; pickled, it is the default group again.

    Args:
        group: A process group of `torch.distributed`; None for the default one, as soon as there is one.
        aside: Whether to talk in a group of its own, with the same processes. In a backward pass others talk too, and where
            ranks use different layers they do not do so in one order.
    """

    def __init__(self, group: "dist.ProcessGroup | None" = None, *, aside: bool = False) -> None:
        self._group = group
        if aside and self.count > 1:
            self._group = dist.new_group(dist.get_process_group_ranks(group), use_local_synchronization=True)

    @property
    def count(self) -> int:
        """How many there are; 1 where nothing is distributed."""
        return dist.get_world_size(self._group) if dist.is_available() and dist.is_initialized() else 1

    @property
    def is_default(self) -> bool:
        """Whether nobody has said which processes these are."""
        return self._group is None

    def largest(self, numbers: Sequence[float]) -> list[float]:
        """The largest of each number over the ranks."""
        together = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        dist.all_reduce(together, op=dist.ReduceOp.MAX, group=self._group)
        return together.tolist()

    def each(self, numbers: Sequence[int]) -> list[list[int]]:
        """The numbers of every rank."""
        mine = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        everyone = [torch.empty_like(mine) for _ in range(self.count)]
        dist.all_gather(everyone, mine, group=self._group)
        return [one.tolist() for one in everyone]

    @property
    def _device(self) -> torch.device:
        """On which collectives work."""
        return torch.device("cuda") if dist.get_backend(self._group) == "nccl" else torch.device("cpu")

    def all_rows(self, r: Float[Tensor, "groups rows features"]) -> Float[Tensor, "groups all features"]:
        """The rows of all ranks, in their order; each rank may have a different number."""
        counts = [torch.zeros(1, dtype=torch.int64, device=r.device) for _ in range(self.count)]
        dist.all_gather(counts, torch.tensor([r.shape[1]], device=r.device), group=self._group)
        sizes = [int(size) for size in counts]
        # Collectives want equal shapes.
        padded = torch.zeros(r.shape[0], max(sizes), r.shape[2], dtype=r.dtype, device=r.device)
        padded[:, : r.shape[1]] = r.detach()
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=self._group)
        return torch.cat([part[:, :size] for part, size in zip(parts, sizes, strict=True)], dim=1)

    def exchange(self, mine: Mapping[tuple[str, int], Tensor]) -> dict[tuple[str, int], Tensor]:
        """The rows of all ranks by name: (groups, rows, features) each. What a rank did not use has no rows there."""
        if self.count == 1:
            return dict(mine)
        forms = {name: (r.shape[0], r.shape[2], r.dtype) for name, r in mine.items()}
        everywhere = self.union(forms, news=not self._agree(repr(sorted(forms.items(), key=repr))))
        device = next(iter(mine.values())).device
        found = {}
        for name, (groups, features, dtype) in everywhere.items():
            r = mine.get(name)
            found[name] = self.all_rows(torch.zeros(groups, 0, features, dtype=dtype, device=device) if r is None else r)
        return found

    def total(self, name: str, mine: Tensor) -> Tensor:
        """The sum over the ranks of what each has for the layer of this name, at which all must be."""
        if self.count == 1:
            return mine
        if not self._agree(name):
            raise RuntimeError(
                f"this rank is at layer {name!r} of its backward pass and another rank at another one: with process_group=... "
                "all ranks must use embeddings in one order"
            )
        self.add(mine)
        return mine

    def _agree(self, text: str) -> bool:
        """Whether all ranks ask with the same text."""
        number = float(zlib.crc32(text.encode()))
        high, low = self.largest([number, -number])
        return high == -low

    def add(self, *tensors: Tensor, owner: int | None = None) -> None:
        """Replace each tensor by its sum over the ranks; with an owner there only, and on others it is of no use afterwards."""
        for tensor in tensors:
            if owner is None:
                dist.all_reduce(tensor, group=self._group)
            else:
                dist.reduce(tensor, self._everywhere(owner), group=self._group)

    @property
    def rank(self) -> int:
        """The number of this one."""
        return dist.get_rank(self._group) if self.count > 1 else 0

    def send(self, owner: int, tensor: Tensor) -> None:
        """Replace a tensor by that of one rank."""
        dist.broadcast(tensor, self._everywhere(owner), group=self._group)

    def _everywhere(self, rank: int) -> int:
        """The number of a rank among all processes."""
        return rank if self._group is None else dist.get_global_rank(self._group, rank)

    def union(self, known: Mapping[_Key, _Spec], *, news: bool) -> dict[_Key, _Spec]:
        """What any rank knows, in one order for all; exchanged only if some rank has `news`."""
        merged = dict(known)
        if any(self.largest([float(news)])):
            everyone: list[dict[_Key, _Spec]] = [{} for _ in range(self.count)]
            dist.all_gather_object(everyone, merged, group=self._group)
            for part in everyone:
                merged |= part
        return dict(sorted(merged.items(), key=lambda item: repr(item[0])))

    def __deepcopy__(self, memo: dict[int, object]) -> "Ranks":
        return self

    def __reduce__(self) -> tuple[type["Ranks"], tuple[()]]:
        return Ranks, ()


def is_sharded(tensor: Tensor) -> bool:
    """Whether this is a `DTensor`. Importing that takes a moment, and where nobody has there is none."""
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def first_row(tensor: Any) -> int:
    """Where in the whole tensor the rows of this rank begin."""
    from torch.distributed.tensor import Shard

    if any(isinstance(placement, Shard) and placement.dim != 0 for placement in tensor.placements):
        raise ValueError(
            f"a gradient placed as {tensor.placements} splits the features of a layer; when='step' needs whole rows, Shard(0)"
        )
    return first_global_row(tensor)


def sum_over_shards(tensor: Any, numbers: Tensor) -> None:
    """Add up what each rank has computed of its shard of a tensor."""
    for dimension, placement in enumerate(tensor.placements):
        if placement.is_shard():
            dist.all_reduce(numbers, group=tensor.device_mesh.get_group(dimension))


def keep_own_part(tensor: Any, full: Tensor) -> None:
    """Write this rank's part of `full`, which all ranks have, into a sharded tensor."""
    from torch.distributed.tensor import DTensor, Replicate

    mesh = tensor.device_mesh
    everywhere = DTensor.from_local(full, mesh, [Replicate()] * mesh.ndim, run_check=False)
    tensor.to_local().copy_(everywhere.redistribute(mesh, tensor.placements).to_local())
