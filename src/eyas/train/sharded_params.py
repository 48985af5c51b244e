"""The masters of a draft cut into slices, one a rank, so that a large draft fits on each.

A rank holds its rows of every trainable parameter: fp32 master, both moments, gradient sum (ZeRO's second
stage, arXiv 1910.02054). What stands whole on all ranks is what the unroll reads: the draft in the compute
dtype. torch's DTensor cuts, adds up and joins. Its ``fully_shard`` would also drop the whole weights between
a module's calls; a step calls each layer K times, so all of them would travel K times forth and back.
"""

from collections.abc import Collection

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

from eyas.config.schema import TrainSettings
from eyas.drafters.base import Draft
from eyas.errors import UserError


class ShardedParams:
    """``masters``: this rank's rows of each trainable parameter, by name, which the optimizer steps.

    The draft's own parameters become whole weights in ``dtype`` (vectors stay fp32), for ``publish`` to
    refresh. Those in ``frozen`` are not stepped and have no ``grad``. Ranks call every method together.
    """

    def __init__(
        self, draft: Draft, dtype: torch.dtype, device: torch.device, frozen: Collection[str] = ()
    ) -> None:
        self.whole = draft.trainable()
        assert dist.group.WORLD is not None
        self.mesh = DeviceMesh.from_group(dist.group.WORLD, device.type)
        self.masters: dict[str, nn.Parameter] = {}
        self._coming: tuple[str, DTensor] | None = None
        for name, parameter in self.whole.items():
            self.masters[name] = master = nn.Parameter(self.cut(parameter.detach()).float())
            if name not in frozen:
                master.grad = torch.zeros_like(master)
            parameter.data = parameter.detach().to(device, dtype if parameter.ndim == 2 else torch.float32)

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows of a tensor that every rank has whole, on the device."""
        return distribute_tensor(whole, self.mesh, [Shard(0)], src_data_rank=None).to_local().clone()

    def join(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """Return whole, on every rank, what each has its rows of."""
        like = self.whole[name]
        parts = DTensor.from_local(
            rows.detach(), self.mesh, [Shard(0)], run_check=False, shape=like.shape, stride=like.stride()
        )
        return parts.full_tensor()

    def join_on_first(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """Return ``join`` in the memory of the first rank's host, nothing on the others."""
        whole = self.join(name, rows)
        return whole.cpu() if dist.get_rank() == 0 else whole.new_empty(0)

    @torch.no_grad()
    def publish(self, only_stepped: bool = False) -> None:
        """Make the draft's weights those of the masters."""
        for name, master in self.masters.items():
            if master.grad is not None or not only_stepped:
                parameter = self.whole[name]
                parameter.copy_(self.join(name, master.to(parameter.dtype)))

    def start(self) -> None:
        """Forget the gradients of the last step."""
        for master in self.masters.values():
            if master.grad is not None:
                master.grad.zero_()

    @torch.no_grad()
    def add(self, name: str, gradient: torch.Tensor) -> None:
        """Start to add every rank's whole ``gradient`` to the slices, in fp32; it is read until ``settle``.

        One is on its way at a time, so that whole gradients do not pile up.
        """
        self.settle()
        parts = DTensor.from_local(gradient.float(), self.mesh, [Partial()], run_check=False)
        self._coming = name, parts.redistribute(placements=[Shard(0)], async_op=True)

    @torch.no_grad()
    def settle(self) -> None:
        """Wait, on a GPU with the stream alone, for what ``add`` started."""
        if self._coming:
            name, rows = self._coming
            gradient = self.masters[name].grad
            assert gradient is not None
            gradient += rows.to_local()
            self._coming = None


def check_sharding(settings: TrainSettings) -> None:
    """Raises: UserError for an optimizer that needs whole matrices."""
    if settings.shard and settings.optimizer == "muon":
        raise UserError(
            "train.optimizer=muon needs whole matrices, and train.shard=true leaves each GPU a slice of them",
            hint="set train.optimizer=adamw, or train.shard=false",
        )
