"""Lists of PyTorch modules whose class is known."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Generic, TypeVar, overload

from torch import nn

M = TypeVar("M", bound=nn.Module)


class Modules(nn.ModuleList, Generic[M]):
    """A ModuleList of modules of one class; PyTorch's own says only that they are modules."""

    def __init__(self, modules: Iterable[M] = ()) -> None:
        super().__init__(modules)

    if TYPE_CHECKING:

        def __iter__(self) -> Iterator[M]: ...

        @overload
        def __getitem__(self, idx: slice) -> Modules[M]: ...

        @overload
        def __getitem__(self, idx: int) -> M: ...

        def __getitem__(self, idx: int | slice) -> M | Modules[M]: ...
