"""Carries out one seat's plan: packs, posts, waits, unpacks, and counts what it did. Decides nothing.

Pieces of 64 KiB and more are messages of their own, straight from and to the framework's storage where
it is contiguous and of the wire's dtype; the rest of a pair's pieces share one packed message a chunk.
The next chunk is posted before this one is waited for, from a second half of the staging memory.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from dynadapt.errors import ChannelError, Finding, Refused
from dynadapt.torch_dtypes import dtype_name, torch_dtype
from dynadapt.transport._torch import cast_into
from dynadapt.transport.schedule import ALIGN
from dynadapt.vps.keys import itemsize

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from dynadapt.protocols import Buffer, Channel, Posted
    from dynadapt.transport.plan import Match, Move, SeatPlan
    from dynadapt.transport.schedule import Chunk
    from dynadapt.vps.box import Box
    from dynadapt.vps.keys import Key
    from dynadapt.vps.layout import Row

__all__ = ["Moved", "Storage", "copy_checked", "execute", "staging_bytes", "staging_needed"]

DIRECT = 64 << 10
"""Bytes from which a piece is a message of its own. Both ends must use the same number."""

_CAST = 1 << 20
"""Elements cast at a time where a cast has to be checked."""


class Storage:
    """Rows of one side that this seat can reach, ready to be read or written box by box.

    `rows` are by endpoint: the seat's own, and those of the files that it reads or writes. They go by
    canonical names.

    >>> from dynadapt.vps.keys import Key
    >>> Storage({}, {}).find(0, Key("w", "param"), None) is None
    True
    """

    def __init__(self, rows: Mapping[int, Iterable[Row]], buffers: Mapping[str, Buffer]) -> None:
        self._rows: dict[tuple[int, Key], list[Row]] = {}
        for endpoint, own in rows.items():
            for row in own:
                self._rows.setdefault((endpoint, row.key), []).append(row)
        self._buffers = buffers
        self._tensors: dict[str, torch.Tensor] = {}

    def find(self, endpoint: int, key: Key, box: Box | None) -> Row | None:
        """The endpoint's row that holds all of `box`, or None."""
        for row in self._rows.get((endpoint, key), ()):
            if box is None or row.box.contains(box):
                return row
        return None

    def places(self, endpoint: int, key: Key, box: Box) -> Iterator[tuple[Row, Buffer]]:
        """Every row of the endpoint that holds all of `box`, with the buffer that it lies in."""
        for row in self._rows.get((endpoint, key), ()):
            if row.box.contains(box):
                yield row, self._buffers[row.buffer]

    def view(self, endpoint: int, key: Key, box: Box) -> torch.Tensor:
        """The elements of `box`, as a view of the framework's own storage, in the box's shape."""
        row = self.find(endpoint, key, box)
        if row is None:
            raise KeyError(f"{key} {box}: no row of endpoint {endpoint} holds it here")
        return self.flat(row.buffer).as_strided(box.shape, row.strides, row.offset_of(box.lo))

    def is_direct(self, endpoint: int, key: Key, box: Box, wire: str, device: str) -> bool:
        """Whether `box` lies in one stretch, as `wire`, on `device`: told without touching its memory."""
        row = self.find(endpoint, key, box)
        if row is None or self._buffers[row.buffer].dtype != wire:
            return False
        dense = 1
        for size, stride in zip(reversed(box.shape), reversed(row.strides), strict=True):
            if size > 1 and stride != dense:
                return False
            dense *= size
        return torch.device(self._buffers[row.buffer].device) == torch.device(device)

    def flat(self, buffer: str) -> torch.Tensor:
        """The 1-D tensor of a buffer; asked for once."""
        tensor = self._tensors.get(buffer)
        if tensor is None:
            tensor = self._tensors[buffer] = self._buffers[buffer].tensor().detach()
        return tensor


@dataclass
class Moved:
    """What one seat did, in bytes; `read` and `written` are those of files. `peak_staging` is the most it
    held at once, `seconds` how long it took from before the first message was posted until the last byte
    was in its place.
    """

    received: int = 0
    sent: int = 0
    copied: int = 0
    read: int = 0
    written: int = 0
    filled: int = 0
    direct: int = 0
    chunks: int = 0
    peak_staging: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class _Piece:
    """Part of a message: a move, the storage it is read from or written to, and where it lies in the
    staging memory (-1: it goes straight from or to storage).
    """

    move: Move
    view: torch.Tensor
    at: int


@dataclass(frozen=True, slots=True)
class _Packed:
    """One message: its peer, its pieces, its bytes, its place in the staging memory."""

    peer: int
    pieces: tuple[_Piece, ...]
    at: int
    nbytes: int


def staging_bytes(chunk_list: Sequence[Chunk]) -> int:
    """Upper bound of the staging memory that `execute` takes for these chunks."""
    sizes = [
        sum(-(-m.nbytes // ALIGN) * ALIGN for m in (*c.receives, *c.sends)) for c in chunk_list
    ]
    return 2 * max(sizes, default=0)


def staging_needed(
    chunk_list: Sequence[Chunk], matched: Match, source: Storage, target: Storage, device: str
) -> int:
    """The staging memory that `execute` will hold at its fullest, to the byte. Touches no tensor."""
    halves, most = [0, 0], 0
    for number, chunk in enumerate(chunk_list):
        used = 0
        for side, moves in ((target, chunk.receives), (source, chunk.sends)):
            for move in moves:
                if side is target:
                    at = (move.target, move.key)
                else:
                    at = (move.source, matched.by_target[move.key].source.key)
                large = move.nbytes >= DIRECT
                if not (large and side.is_direct(*at, move.box, move.wire, device)):
                    used += -(-move.nbytes // ALIGN) * ALIGN
        halves[number % 2] = max(halves[number % 2], used)
        most = max(most, sum(halves))
    return most


def execute(
    plan: SeatPlan,
    chunk_list: Sequence[Chunk],
    matched: Match,
    source: Storage,
    target: Storage,
    channel: Channel | None,
    *,
    narrow: str = "if-exact",
    timeout: float = 300.0,
    device: str = "cpu",
) -> Moved:
    """Move everything of one seat's plan. Raises `ChannelError`, or `Refused` with every inexact cast.

    All seats of the plan call it. The source's storage is only read; the target's is written. `device`
    is where the channel wants its messages: "cpu" for gloo, this seat's CUDA device for NCCL.
    """
    began = time.monotonic()
    run = _Run(matched, source, target, channel, narrow, began + timeout, device)
    pending: list[tuple[int, Chunk, list[_Packed], Posted]] = []
    for number, chunk in enumerate(chunk_list):
        if len(pending) == 2:
            run.settle(*pending.pop(0))
        pending.append(run.start(number % 2, chunk))
        if number == 0:
            run.local(plan)
    if not chunk_list:
        run.local(plan)
    for item in pending:
        run.settle(*item)
    if run.inexact:
        raise Refused(run.inexact.values())
    run.moved.seconds = time.monotonic() - began
    return run.moved


class _Run:
    def __init__(
        self,
        matched: Match,
        source: Storage,
        target: Storage,
        channel: Channel | None,
        narrow: str,
        deadline: float,
        device: str,
    ) -> None:
        self._matched, self._source, self._target = matched, source, target
        self._channel, self._narrow, self._deadline = channel, narrow, deadline
        self._device = torch.device(device)
        self._stages = [self._empty(0), self._empty(0)]
        self.moved = Moved()
        self.inexact: dict[Key, Finding] = {}

    def local(self, plan: SeatPlan) -> None:
        """Zeros, resident copies, and what lies in files."""
        for endpoint, key, box in plan.fills:
            self._target.view(endpoint, key, box).zero_()
            self.moved.filled += box.volume * itemsize(self._matched.by_target[key].target.dtype)
        for move in plan.local:
            self._copy(self._read(move), self._into(move), move)
            self.moved.read += move.nbytes if move.source < 0 else 0
            self.moved.written += move.nbytes if move.target < 0 else 0
            self.moved.copied += move.nbytes if move.source == move.target else 0

    def _copy(self, source: torch.Tensor, target: torch.Tensor, move: Move) -> None:
        """Where it loses bits, the rest moves all the same: all such tensors are told at the end, and no
        peer waits for what does not come.
        """
        if finding := copy_checked(source, target, move, self._narrow):
            self.inexact.setdefault(move.key, finding)

    def start(self, half: int, chunk: Chunk) -> tuple[int, Chunk, list[_Packed], Posted]:
        """Pack and post one chunk, from one half of the staging memory."""
        assert self._channel is not None
        into, used = self._messages(chunk.receives, lambda m: m.source, self._into, 0)
        out, used = self._messages(chunk.sends, lambda m: m.target, self._read, used)
        if self._stages[half].numel() < used:
            self._stages[half] = self._empty(0)  # given back before the bigger one is taken
            self._stages[half] = self._empty(used)
        receives = [(message.peer, self._bytes(half, message)) for message in into]
        sends = []
        for message in out:
            for piece in message.pieces:
                if piece.at >= 0:
                    self._copy(piece.view, self._staged(half, piece), piece.move)
            sends.append((message.peer, self._bytes(half, message)))
        held = sum(stage.numel() for stage in self._stages)
        self.moved.peak_staging = max(self.moved.peak_staging, held)
        self.moved.chunks += 1
        self.moved.sent += sum(m.nbytes for m in chunk.sends)
        return half, chunk, into, self._channel.post(receives, sends)

    def settle(self, half: int, chunk: Chunk, into: list[_Packed], posted: Posted) -> None:
        """Wait for one chunk and unpack it."""
        try:
            posted.wait(self._deadline - time.monotonic())
        except ChannelError as error:
            raise _named(error, chunk) from error
        for message in into:
            for piece in message.pieces:
                self.moved.received += piece.move.nbytes
                if piece.at >= 0:
                    piece.view.copy_(self._staged(half, piece))
                else:
                    self.moved.direct += piece.move.nbytes

    def _read(self, move: Move) -> torch.Tensor:
        key = self._matched.by_target[move.key].source.key
        return self._source.view(move.source, key, move.box)

    def _into(self, move: Move) -> torch.Tensor:
        return self._target.view(move.target, move.key, move.box)

    def _messages(
        self,
        moves: Sequence[Move],
        peer_of: Callable[[Move], int],
        view_of: Callable[[Move], torch.Tensor],
        at: int,
    ) -> tuple[list[_Packed], int]:
        """The messages of one direction of one chunk: per peer one packed one, then the big pieces.

        Staging places are given out from `at` on; the first free one comes back.
        """
        by_peer: dict[int, list[Move]] = {}
        for move in moves:
            by_peer.setdefault(peer_of(move), []).append(move)
        found: list[_Packed] = []
        for peer, own in sorted(by_peer.items()):
            start, pieces = at, []
            for move in own:
                if move.nbytes < DIRECT:
                    pieces.append(_Piece(move, view_of(move), at))
                    at += -(-move.nbytes // ALIGN) * ALIGN
            if pieces:
                found.append(_Packed(peer, tuple(pieces), start, at - start))
            for move in own:
                if move.nbytes < DIRECT:
                    continue
                view = view_of(move)
                if self._is_direct(view, move.wire):
                    found.append(_Packed(peer, (_Piece(move, view, -1),), -1, move.nbytes))
                else:
                    found.append(_Packed(peer, (_Piece(move, view, at),), at, move.nbytes))
                    at += -(-move.nbytes // ALIGN) * ALIGN
        return found, at

    def _is_direct(self, view: torch.Tensor, wire: str) -> bool:
        fits = view.device == self._device and dtype_name(view.dtype) == wire
        return fits and view.is_contiguous()

    def _bytes(self, half: int, message: _Packed) -> torch.Tensor:
        """The contiguous uint8 tensor that a message goes from or to."""
        if message.at >= 0:
            return self._stages[half][message.at : message.at + message.nbytes]
        return message.pieces[0].view.reshape(-1).view(torch.uint8)

    def _staged(self, half: int, piece: _Piece) -> torch.Tensor:
        move = piece.move
        stage = self._stages[half][piece.at : piece.at + move.nbytes]
        return stage.view(torch_dtype(move.wire)).view(move.box.shape)

    def _empty(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)


def copy_checked(
    source: torch.Tensor, target: torch.Tensor, move: Move, narrow: str
) -> Finding | None:
    """Copy with a cast where the dtypes differ; what a narrowing one loses though it has to be exact."""
    cast_into(target, source)
    widens = target.dtype.itemsize > source.dtype.itemsize
    if source.dtype == target.dtype or narrow == "allow" or widens:
        return None
    for part, cast in zip(_slabs(source), _slabs(target), strict=True):
        back = cast.to(part.device, part.dtype)
        if not torch.equal(_bits(back), _bits(part.contiguous())):
            return _inexact(move, source.dtype, target.dtype)
    return None


def _named(error: ChannelError, chunk: Chunk) -> ChannelError:
    """The same error with the tensors that were under way to or from that peer."""
    keys = dict.fromkeys(
        f"{move.key} {move.box}"
        for move in (*chunk.receives, *chunk.sends)
        if error.peer in {None, -1, move.source, move.target}
    )
    shown = ", ".join(list(keys)[:3]) + (f" and {len(keys) - 3} more" if len(keys) > 3 else "")
    return ChannelError(f"{error}; under way in chunk {chunk.number}: {shown}", peer=error.peer)


def _inexact(move: Move, source: torch.dtype, target: torch.dtype) -> Finding:
    return Finding(
        "narrowing",
        f"{move.key} {move.box}",
        f"its {source} values are not exact in {target}",
        "keep the dtype in the target, or let narrow be 'allow' (of save: dtype=)",
    )


def _slabs(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """A tensor in parts of at most `_CAST` elements, cut along its first dims."""
    if tensor.numel() <= _CAST or not tensor.ndim:
        yield tensor
        return
    inner = tensor.numel() // tensor.shape[0]
    if inner > _CAST:
        for part in tensor.unbind(0):
            yield from _slabs(part)
        return
    yield from torch.split(tensor, max(_CAST // inner, 1), 0)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bits as integers, so that equal means equal, NaN and signed zero included."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(kinds[tensor.dtype.itemsize])
