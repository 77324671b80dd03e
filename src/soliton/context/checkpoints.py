"""Checkpoints of a stream, owning their data, as a tree under a byte budget.

A node stores what its parent does not: the ids and KV segments from the parent's end to its own, and its own state,
conv tail and boundary hidden. Restoring walks the path from the root and copies into the stream's buffers. The MTP
entry at a node's boundary depends on the token after it, so it is never stored: whoever continues computes it from
the boundary hidden. Of a block drafter the features are kept, not the keys and values made of them, which would be 16
times as large for Ling-3.0-flash's: whoever restores makes them anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from .stream import Stream


@dataclass(eq=False, kw_only=True)
class Saved:
    """One checkpoint: the sequence of ``length`` tokens that ends here. Tensors are None at the root."""

    length: int
    parent: Saved | None
    ids: tuple[int, ...] = ()
    kv: Tensor | None = None
    draft_kv: Tensor | None = None
    features: Tensor | None = None
    state: Tensor | None = None
    tail: Tensor | None = None
    boundary: Tensor | None = None
    used: int = 0
    children: list[Saved] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors this node owns."""
        owned = (self.kv, self.draft_kv, self.features, self.state, self.tail, self.boundary)
        return sum(t.nbytes for t in owned if t is not None)


class CheckpointTree:
    """All checkpoints of one stream. ``budget``: bytes; 0 keeps nothing. Least recently used leaves go first."""

    def __init__(self, budget: int) -> None:
        self.budget, self.used_bytes = budget, 0
        self._root = Saved(length=0, parent=None)
        self._clock = 0

    def find(self, ids: Sequence[int]) -> Saved | None:
        """The longest checkpoint whose sequence is a prefix of ``ids`` (all of it allowed), or None."""
        best = self._deepest(self._root, ids)
        return best if best.length else None

    def restore(self, node: Saved, stream: Stream) -> None:
        """Copy the node's whole sequence into the stream's buffers and make it the committed state; a block drafter's
        keys and values are the caller's to make of the features."""
        for part in self._path(node):
            start = part.parent.length if part.parent is not None else 0
            if part.kv is None:
                continue
            stream.kv[:, start : part.length] = part.kv
            if part.draft_kv is not None and stream.draft_kv is not None:
                stream.draft_kv[max(start - 1, 0) : part.length - 1] = part.draft_kv
            if part.features is not None and stream.features is not None:
                stream.features[start : part.length] = part.features
            self._touch(part)
        assert node.state is not None and node.tail is not None and node.boundary is not None
        stream.states[0] = node.state
        stream.current.zero_()
        stream.windows[: stream.tail] = node.tail
        stream.boundary.copy_(node.boundary)

    def save(self, ids: Sequence[int], stream: Stream, snapshot: Snapshot | None = None) -> Saved | None:
        """Store the committed state of the stream, whose committed tokens are ``ids``; None if the budget forbids.

        ``snapshot``: state, tail and boundary taken earlier at this length, when the stream has moved on since (KV
        up to this length is still in place). A checkpoint of the same sequence is only touched.
        """
        length = len(ids)
        parent = self._deepest(self._root, ids)
        if length == 0 or parent.length == length:
            self._touch(parent)
            return parent if length else None
        snapshot = snapshot or Snapshot.take(stream)
        start, draft_start = parent.length, max(parent.length - 1, 0)
        node = Saved(
            length=length,
            parent=parent,
            ids=tuple(ids[start:length]),
            kv=stream.kv[:, start:length].clone(),
            draft_kv=stream.draft_kv[draft_start : length - 1].clone() if stream.draft_kv is not None else None,
            features=stream.features[start:length].clone() if stream.features is not None else None,
            state=snapshot.state,
            tail=snapshot.tail,
            boundary=snapshot.boundary,
        )
        if not self._make_room(node):
            return None
        parent.children.append(node)
        self.used_bytes += node.nbytes
        self._touch(node)
        return node

    def clear(self) -> None:
        """Forget everything."""
        self._root.children.clear()
        self.used_bytes = 0

    def __len__(self) -> int:
        return sum(1 for _ in self._nodes(self._root)) - 1

    def _deepest(self, node: Saved, ids: Sequence[int]) -> Saved:
        best, waiting = node, [node]
        while waiting:  # no recursion: a long conversation makes a deep tree
            at = waiting.pop()
            if at.length > best.length:
                best = at
            waiting += [
                child
                for child in at.children
                if child.length <= len(ids) and child.ids == tuple(ids[at.length : child.length])
            ]
        return best

    def _path(self, node: Saved) -> list[Saved]:
        path = [node]
        while path[-1].parent is not None:
            path.append(path[-1].parent)
        return path[::-1]

    def _nodes(self, node: Saved) -> Iterator[Saved]:
        waiting = [node]
        while waiting:
            at = waiting.pop()
            yield at
            waiting += at.children

    def _touch(self, node: Saved) -> None:
        self._clock += 1
        node.used = self._clock

    def _make_room(self, node: Saved) -> bool:
        """Evict leaves outside the new node's path until it fits; False if it cannot."""
        path = self._path(node)
        if sum(part.nbytes for part in path) > self.budget:
            return False  # whatever was evicted, it would not fit
        keep = set(map(id, path))
        while self.used_bytes + node.nbytes > self.budget:
            leaves = [n for n in self._nodes(self._root) if not n.children and n.parent and id(n) not in keep]
            if not leaves:
                return False
            oldest = min(leaves, key=lambda n: n.used)
            assert oldest.parent is not None
            oldest.parent.children.remove(oldest)
            self.used_bytes -= oldest.nbytes
        return True


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """State, tail and boundary copied out of a stream at one moment, in stream order."""

    state: Tensor
    tail: Tensor
    boundary: Tensor

    @classmethod
    def marked(cls, stream: Stream) -> Snapshot:
        """What the last step that ended at a rolling checkpoint's place left on a GPU."""
        assert stream.marks is not None
        state, tail, boundary = (t.clone() for t in stream.marks)
        return cls(state=state, tail=tail, boundary=boundary)

    @classmethod
    def take(cls, stream: Stream) -> Snapshot:
        """Copy what the stream has committed now."""
        return cls(
            state=stream.state(),
            tail=stream.windows[: stream.tail].clone(),
            boundary=stream.boundary.clone(),
        )
