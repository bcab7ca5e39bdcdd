"""Which prefixes does the directory remember, and which does it forget when it is full?

    tenant ─▶ leaves, longest unused first      oldest leaf goes first; then the block before it,
    block ◀─ block ◀─ block ◀─ leaf             unless that one has other children or was the end
                 └◀── leaf                      of a younger lookup

So what is left of a prefix is always its beginning. The tenant that takes most gives first.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict

from ripresa.cluster.directory.holdings import Holdings
from ripresa.workers.errors import ErrorCode, RipresaError


class Node:
    """One remembered block.

    Attributes:
        parent: the block before it, if it was remembered when this one came.
        used: when it was last the end of what a lookup found; counted, not timed.
        keepers: bits of those holders that were not told that theirs is a copy.
    """

    __slots__ = ("hash", "holdings", "keepers", "num_children", "parent", "tenant", "used")

    def __init__(
        self, block_hash: bytes, holdings: Holdings, tenant: str, parent: Node | None, used: int
    ) -> None:
        self.hash = block_hash
        self.holdings = holdings
        self.tenant = tenant
        self.parent = parent
        self.num_children = 0
        self.used = used
        self.keepers = 0


class _Tenant:
    """Blocks charged to one tenant; `leaves` are those without children, longest unused first."""

    __slots__ = ("leaves", "num_blocks")

    def __init__(self) -> None:
        self.num_blocks = 0
        self.leaves: OrderedDict[bytes, Node] = OrderedDict()


class PrefixMemory:
    """Blocks by hash, at most `capacity_blocks` after each `shrink`.

    Args:
        empty: the holdings of a block that nobody holds.
    """

    def __init__(self, capacity_blocks: int, empty: Holdings) -> None:
        if capacity_blocks < 1:
            raise ValueError(f"capacity_blocks must be at least 1, got {capacity_blocks}")
        self._capacity_blocks = capacity_blocks
        self._empty = empty
        self._nodes: dict[bytes, Node] = {}
        self._tenants: dict[str, _Tenant] = {}
        self._clock = 0
        self._unswept: list[bytes] = []
        self.find = self._nodes.get

    def __len__(self) -> int:
        return len(self._nodes)

    def usage(self) -> dict[str, int]:
        """Blocks by the tenant that they are charged to."""
        return {name: tenant.num_blocks for name, tenant in self._tenants.items()}

    def add(self, block_hash: bytes, parent_hash: bytes | None, tenant: str) -> Node:
        """The block's node, made if there is none. The first tenant to name it pays for it."""
        node = self._nodes.get(block_hash)
        if node is not None:
            return node
        parent = None if parent_hash is None else self._nodes.get(parent_hash)
        self._clock += 1
        node = Node(block_hash, self._empty, tenant, parent, self._clock)
        self._nodes[block_hash] = node
        if parent is not None:
            parent.num_children += 1
            self._tenants[parent.tenant].leaves.pop(parent.hash, None)
        account = self._tenants.setdefault(tenant, _Tenant())
        account.num_blocks += 1
        account.leaves[block_hash] = node
        return node

    def touch(self, node: Node) -> None:
        """A lookup ended here."""
        self._clock += 1
        node.used = self._clock
        if not node.num_children:
            self._tenants[node.tenant].leaves.move_to_end(node.hash)

    def prune(self, node: Node) -> None:
        """Forget a block that nobody holds and none follows, and those before it likewise."""
        at: Node | None = node
        while at is not None and not at.holdings.masks and not at.num_children:
            at = self._remove(at)

    def shrink(self) -> list[Node]:
        """Forget the longest unused ends of prefixes until the capacity is kept; which ones."""
        left = len(self._nodes) - self._capacity_blocks
        forgotten = []
        while left > 0:
            # The largest gives until it is no larger than the next one.
            sizes = heapq.nlargest(2, (t.num_blocks for t in self._tenants.values()))
            account = max(self._tenants.values(), key=lambda tenant: tenant.num_blocks)
            surplus = sizes[0] - sizes[1] if len(sizes) > 1 else left
            for _ in range(min(left, max(1, surplus))):
                node = next(iter(account.leaves.values()))
                self._remove(node)
                forgotten.append(node)
                left -= 1
        return forgotten

    def _remove(self, node: Node) -> Node | None:
        """Forget a leaf; the block before it."""
        del self._nodes[node.hash]
        account = self._tenants[node.tenant]
        del account.leaves[node.hash]
        account.num_blocks -= 1
        if not account.num_blocks:
            del self._tenants[node.tenant]
        parent = node.parent
        if parent is None:
            return None
        parent.num_children -= 1
        if not parent.num_children:
            leaves = self._tenants[parent.tenant].leaves
            leaves[parent.hash] = parent
            if parent.used <= node.used:
                leaves.move_to_end(parent.hash, last=False)
        return parent

    def begin_sweep(self) -> None:
        """Holders left many blocks at once: look, little by little, for those held by nobody."""
        self._unswept = list(self._nodes)

    def sweep(self, num_blocks: int) -> None:
        """Look at the next `num_blocks` blocks of the sweep."""
        for _ in range(min(num_blocks, len(self._unswept))):
            node = self._nodes.get(self._unswept.pop())
            if node is not None:
                self.prune(node)

    def check_integrity(self) -> None:
        """Raise RipresaError (INTERNAL) unless links, leaves and accounts agree."""
        children: Counter[bytes] = Counter()
        usage: Counter[str] = Counter()
        for node in self._nodes.values():
            usage[node.tenant] += 1
            if node.parent is not None:
                children[node.parent.hash] += 1
        listed = {key for tenant in self._tenants.values() for key in tenant.leaves}
        faults = {
            "accounts do not add up": usage != self.usage(),
            "a followed block is forgotten": not children.keys() <= self._nodes.keys(),
            "a block's children are miscounted": any(
                node.num_children != children[key] for key, node in self._nodes.items()
            ),
            "the leaves are not those blocks that none follows": (
                listed != self._nodes.keys() - children.keys()
            ),
        }
        for fault, is_present in faults.items():
            if is_present:
                raise RipresaError(ErrorCode.INTERNAL, f"prefix memory: {fault}")
