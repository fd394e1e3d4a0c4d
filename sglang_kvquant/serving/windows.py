"""Which tokens have a BF16 copy, and where: rings of recent tokens and shared sink groups.

Recent tokens. Each request row (SGLang's req_pool_idx) owns a ring; position p of its sequence
lies in column p % recent_tokens. ``ring_start[row]`` is the first position that the row's present
owner computed itself, so [max(ring_start, length - recent_tokens), length) is exactly what the
ring holds. A row with a new owner starts at NOT_STARTED.

Sinks. A group holds the first sink_tokens positions of one prefix. A slot knows its group through
a tag, ``generation * num_groups + group``, that every write overwrites: so a slot never keeps the
tag of an earlier tenant, and no allocator or radix tree needs to be watched. Groups are reused
stalest first; reuse raises the generation, so that old tags become invalid instead of pointing at
another sequence's rows. Requests that share a prefix share its slots and with them its group; two
that part inside the sinks continue in a group of their own.

Everything a decode step does has fixed shapes and no host synchronisation. Row 0 and slot 0 are
SGLang's dummies for padded tokens: they are written and read like others, harmlessly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import accumulate

import torch

from ..config import WindowConfig
from ..layout import ReadPlan

NOT_STARTED = torch.iinfo(torch.int64).max
NO_TAG = -1


@dataclass(frozen=True, slots=True)
class WritePlan:
    """Where the new tokens of a step go, besides their slots; -1 means nowhere.

    Attributes:
        out_cache_loc: int64 [num_tokens], slots.
        ring_index: int64 [num_tokens], row * recent_tokens + column.
        sink_index: int64 [num_tokens], group * sink_tokens + position.
    """

    out_cache_loc: torch.Tensor
    ring_index: torch.Tensor
    sink_index: torch.Tensor


@dataclass(frozen=True, slots=True)
class ExtendLens:
    """New tokens of each request of an extend step, on the device and on the host.

    Attributes:
        qo_indptr: int32 [batch + 1] on the device, first new token of each request.
        qo_indptr_cpu: the same on the host.
        prefix_lens_cpu: cached tokens of each request, on the host.
    """

    qo_indptr: torch.Tensor
    qo_indptr_cpu: torch.Tensor
    prefix_lens_cpu: Sequence[int]

    @property
    def has_prefix(self) -> bool:
        return any(self.prefix_lens_cpu)

    @property
    def max_extend_len(self) -> int:
        return int(self.qo_indptr_cpu.diff().max())


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one forward step reads and writes, the same for every layer.

    Attributes:
        read: for decode, the whole cache with the step's own tokens; for extend, the prefix with
            the windows as they are before the step's writes.
        write: destinations of the new tokens.
        extend: how the new tokens are split between requests; None for decode, where each has one.
    """

    read: ReadPlan
    write: WritePlan
    extend: ExtendLens | None = None

    def first_rows(self, batch_size: int) -> StepPlan:
        """The plan of the first requests, sharing memory with this one."""

        def head(part: ReadPlan | WritePlan) -> dict[str, torch.Tensor]:
            return {f.name: getattr(part, f.name)[:batch_size] for f in fields(part)}

        return StepPlan(ReadPlan(**head(self.read)), WritePlan(**head(self.write)))

    def copy_(self, other: StepPlan) -> None:
        """Take over the contents of a plan of the same shape."""
        pairs = ((self.read, other.read), (self.write, other.write))
        for mine, theirs in pairs:
            for f in fields(mine):
                getattr(mine, f.name).copy_(getattr(theirs, f.name))


class WindowTables:
    """State of all windows of one rank, on the device of the cache.

    Args:
        windows: sizes.
        num_rows: request rows, the dummy row 0 included.
        num_slots: slots of the pool, the dummy page included.
        num_groups: sink groups; more than the running requests, so that none of them loses its
            group to another one.
        page_size: tokens per page.
        device: of the tables.
    """

    def __init__(
        self,
        windows: WindowConfig,
        num_rows: int,
        num_slots: int,
        num_groups: int,
        page_size: int,
        device: torch.device | str,
    ) -> None:
        if windows.sink_tokens and num_groups < 1:
            raise ValueError("sinks need at least one group")
        self.windows, self.page_size, self.num_groups = windows, page_size, num_groups
        self.device = torch.device(device)

        def full(size: int, value: int) -> torch.Tensor:
            return torch.full((size,), value, dtype=torch.int64, device=device)

        self.ring_start = full(num_rows, NOT_STARTED)  # [num_rows]
        self.row_tag = full(num_rows, NO_TAG)  # [num_rows], the group a row writes its sinks to
        self.slot_tag = full(num_slots, NO_TAG)  # [num_slots]
        # The last entry of the next two takes the writes that are meant for no group. A group that
        # was never used has a negative tag, which equals that of no slot.
        self.group_tag = torch.arange(-num_groups, 1, device=device)  # [num_groups + 1]
        self.group_stamp = full(num_groups + 1, 0)  # [num_groups + 1], clock of the last use
        self.clock = full(1, 0)  # [1], steps
        self.groups_stolen = full(1, 0)  # [1], groups taken from an earlier prefix
        self.sink_misses = full(1, 0)  # [1], cached sink positions of a prefix without BF16 copy
        self._sink_columns = torch.arange(windows.sink_tokens, device=device)  # [sink_tokens]
        self._new_rows: list[int] = []

    def note_new_rows(self, rows: list[int]) -> None:
        """Rows that just got a new owner. Called by the scheduler; applied by the next step, so
        that steps already under way still see the old owner."""
        self._new_rows.extend(rows)

    def _start_step(self) -> None:
        self.clock += 1
        if self._new_rows:
            rows = torch.tensor(self._new_rows, device=self.device)
            self._new_rows = []
            self.ring_start[rows] = NOT_STARTED
            self.row_tag[rows] = NO_TAG

    def plan_decode(
        self,
        rows: torch.Tensor,
        seq_lens: torch.Tensor,
        out_cache_loc: torch.Tensor,
        req_to_token: torch.Tensor,
        max_len: int,
    ) -> StepPlan:
        """Plan a step of one new token per request and record its sinks.

        Args:
            rows: int64 [batch], request rows.
            seq_lens: int64 [batch], lengths with the new token.
            out_cache_loc: int64 [batch], slots of the new tokens, already in req_to_token.
            req_to_token: int32 [num_rows, max_context_len], SGLang's slots per position.
            max_len: at least the longest of seq_lens; sets the width of the page table.
        """
        self._start_step()
        rows, seq_lens = rows.long(), seq_lens.long()
        write = self._write_plan(rows, seq_lens - 1, seq_lens, out_cache_loc.long())
        sink_group = self._sink_table(rows, seq_lens, req_to_token)
        self._touch(sink_group, self.row_tag[rows])
        return StepPlan(self._read_plan(rows, seq_lens, sink_group, req_to_token, max_len), write)

    def plan_extend(
        self,
        rows: torch.Tensor,
        prefix_lens: torch.Tensor,
        extend_lens: torch.Tensor,
        out_cache_loc: torch.Tensor,
        req_to_token: torch.Tensor,
        prefix_lens_cpu: Sequence[int],
        extend_lens_cpu: Sequence[int],
    ) -> StepPlan:
        """Plan a step of several new tokens per request; assigns sink groups to those that start.

        Args:
            rows: int64 [batch], request rows.
            prefix_lens: int64 [batch], cached tokens of each request.
            extend_lens: int64 [batch], new tokens of each request; their sum is num_tokens.
            out_cache_loc: int64 [num_tokens], slots of the new tokens.
            req_to_token: int32 [num_rows, max_context_len].
            prefix_lens_cpu, extend_lens_cpu: the lengths on the host.
        """
        self._start_step()
        rows, prefix_lens, extend_lens = rows.long(), prefix_lens.long(), extend_lens.long()
        request, position, lens = self._new_tokens(
            prefix_lens, extend_lens, prefix_lens_cpu, extend_lens_cpu
        )
        self.ring_start[rows] = torch.minimum(self.ring_start[rows], prefix_lens)
        sink_group = self._sink_table(rows, prefix_lens, req_to_token)
        self._count_misses(sink_group, prefix_lens)
        self._touch(sink_group, self.row_tag[rows])
        self._assign_groups(rows, prefix_lens)

        seq_lens = (prefix_lens + extend_lens)[request]
        write = self._write_plan(rows[request], position, seq_lens, out_cache_loc.long())
        longest = max(prefix_lens_cpu)
        read = self._read_plan(rows, prefix_lens, sink_group, req_to_token, longest)
        return StepPlan(read, write, lens)

    def _new_tokens(
        self,
        prefix_lens: torch.Tensor,
        extend_lens: torch.Tensor,
        prefix_lens_cpu: Sequence[int],
        extend_lens_cpu: Sequence[int],
    ) -> tuple[torch.Tensor, torch.Tensor, ExtendLens]:
        """Request and position of every new token, int64 [num_tokens], and how they are split."""
        host_indptr = torch.tensor([0, *accumulate(extend_lens_cpu)], dtype=torch.int32)
        num_tokens = int(host_indptr[-1])
        qo_indptr = torch.nn.functional.pad(extend_lens.cumsum(0), (1, 0))  # [batch + 1]
        request = torch.repeat_interleave(extend_lens, output_size=num_tokens)
        token = torch.arange(num_tokens, device=self.device)
        position = prefix_lens[request] + token - qo_indptr[request]
        return request, position, ExtendLens(qo_indptr.int(), host_indptr, prefix_lens_cpu)

    def _read_plan(
        self,
        rows: torch.Tensor,
        kv_lens: torch.Tensor,
        sink_group: torch.Tensor,
        req_to_token: torch.Tensor,
        max_len: int,
    ) -> ReadPlan:
        page_starts = req_to_token[rows, : max(max_len, 1) : self.page_size]
        begin = torch.maximum(self.ring_start[rows], kv_lens - self.windows.recent_tokens)
        return ReadPlan(
            page_table=(page_starts // self.page_size).int(),  # [batch, max_pages]
            kv_lens=kv_lens.int(),
            ring_row=rows.int(),
            ring_begin=torch.minimum(begin.clamp(min=0), kv_lens).int(),
            sink_group=sink_group.int(),
        )

    def _write_plan(
        self,
        rows: torch.Tensor,
        position: torch.Tensor,
        seq_lens: torch.Tensor,
        out_cache_loc: torch.Tensor,
    ) -> WritePlan:
        """Places of new tokens, all arguments int64 [num_tokens]; tags their slots, which clears
        whatever an earlier tenant left there."""
        tag = self.row_tag[rows]
        writes_sink = (position < self.windows.sink_tokens) & self._valid(tag)
        tag = tag.where(writes_sink, NO_TAG)
        self.slot_tag[out_cache_loc] = tag
        group = tag % max(self.num_groups, 1)
        sink_index = (group * self.windows.sink_tokens + position).where(writes_sink, -1)
        return WritePlan(out_cache_loc, self._ring_index(rows, position, seq_lens), sink_index)

    def _ring_index(
        self, rows: torch.Tensor, position: torch.Tensor, seq_lens: torch.Tensor
    ) -> torch.Tensor:
        """Place of new tokens in the rings, -1 for those that the same step pushes out again."""
        recent = self.windows.recent_tokens
        if not recent:
            return torch.full_like(position, -1)
        return (rows * recent + position % recent).where(position >= seq_lens - recent, -1)

    def _valid(self, tag: torch.Tensor) -> torch.Tensor:
        """Whether tags name a group that was not taken away since."""
        return (tag >= 0) & (self.group_tag[tag % max(self.num_groups, 1)] == tag)

    def _sink_table(
        self, rows: torch.Tensor, kv_lens: torch.Tensor, req_to_token: torch.Tensor
    ) -> torch.Tensor:
        """Group of each of the first positions, -1 where none: int64 [batch, sink_tokens]."""
        columns = self._sink_columns
        slots = req_to_token[rows, : len(columns)]  # [batch, <= sink_tokens]
        if slots.shape[1] < len(columns):  # a context shorter than the sinks
            slots = torch.nn.functional.pad(slots, (0, len(columns) - slots.shape[1]))
        tag = self.slot_tag[slots.long()]
        known = self._valid(tag) & (columns < kv_lens.unsqueeze(1))
        return (tag % max(self.num_groups, 1)).where(known, -1)

    def _count_misses(self, sink_group: torch.Tensor, prefix_lens: torch.Tensor) -> None:
        in_prefix = self._sink_columns < prefix_lens.unsqueeze(1)  # [batch, sink_tokens]
        self.sink_misses += (in_prefix & (sink_group < 0)).sum()

    def _touch(self, sink_group: torch.Tensor, row_tag: torch.Tensor) -> None:
        """Mark the groups that a step reads or will write as used now."""
        unused = self.num_groups
        own = (row_tag % max(unused, 1)).where(self._valid(row_tag), unused)
        self.group_stamp[own] = self.clock
        self.group_stamp[sink_group.where(sink_group >= 0, unused)] = self.clock

    def _assign_groups(self, rows: torch.Tensor, prefix_lens: torch.Tensor) -> None:
        """Give the stalest groups to requests that start inside the sinks without one."""
        if not self.windows.sink_tokens:
            return
        needs = (prefix_lens < self.windows.sink_tokens) & ~self._valid(self.row_tag[rows])
        count = min(len(rows), self.num_groups)
        stalest = self.group_stamp[:-1].topk(count, largest=False).indices  # [count]
        rank = needs.cumsum(0) - 1  # [batch]
        served = needs & (rank < count)
        group = stalest[rank.clamp(0, count - 1)].where(served, self.num_groups)  # [batch]
        tag = self.group_tag[group]
        self.groups_stolen += (served & (tag >= 0)).sum()
        tag = tag + self.num_groups
        self.group_tag[group] = tag
        self.group_tag[self.num_groups :] = NO_TAG
        self.group_stamp[group] = self.clock
        self.row_tag[rows] = tag.where(served, self.row_tag[rows])
