"""Which positions are read from BF16 copies, and that a copy never belongs to anyone else.

A small scheduler plays SGLang's part: rows, paged slots, a prefix cache that rewrites a request's
slots to those it already holds, chunked prefill, retraction, eviction. Buffers hold one number per
token instead of keys and values: the identity of the whole prefix that the token ends, so a row of
another sequence, or of another position, cannot go unnoticed.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch

from sglang_kvquant.config import WindowConfig
from sglang_kvquant.serving.windows import StepPlan, WindowTables


def identity(tokens: list[int]) -> int:
    return hash(tuple(tokens)) & 0x7FFFFFFFFFFF


@dataclass
class Request:
    tokens: list[int]
    row: int = -1
    slots: list[int] = field(default_factory=list)  # of the tokens computed so far
    first_own: int = 0  # first position this request computed itself
    tree_len: int = 0  # leading slots that belong to the tree

    @property
    def length(self) -> int:
        return len(self.slots)


class FakeScheduler:
    """Rows, slots and a prefix cache around WindowTables."""

    def __init__(
        self,
        sink: int = 8,
        recent: int = 12,
        *,
        num_requests: int = 16,
        num_groups: int = 64,
        num_slots: int = 4096,
        page_size: int = 1,
        max_context: int = 256,
    ) -> None:
        self.windows, self.page_size = WindowConfig(sink, recent), page_size
        self.tables = WindowTables(
            self.windows, num_requests + 1, num_slots, num_groups, page_size, "cpu"
        )
        self.req_to_token = torch.zeros(num_requests + 1, max_context, dtype=torch.int32)
        self.free_rows = list(range(1, num_requests + 1))
        self.free_pages = list(range(1, num_slots // page_size))
        random.shuffle(self.free_pages)
        self.tree: dict[tuple[int, ...], int] = {}  # page-aligned prefix -> its last page
        self.ring = torch.zeros((num_requests + 1) * max(recent, 1), dtype=torch.int64)
        self.sinks = torch.zeros(max(num_groups * sink, 1), dtype=torch.int64)
        self.packed = torch.zeros(num_slots, dtype=torch.int64)

    # What SGLang does.

    def match(self, tokens: list[int]) -> list[int]:
        """Slots of the longest cached prefix, capped like a real hit."""
        limit = max(0, min(len(tokens) - 1, len(tokens) - self.windows.recent_tokens))
        return self.cached_slots(tokens[:limit])

    def cached_slots(self, tokens: list[int]) -> list[int]:
        slots: list[int] = []
        for length in range(self.page_size, len(tokens) + 1, self.page_size):
            page = self.tree.get(tuple(tokens[:length]))
            if page is None:
                break
            slots += range(page * self.page_size, (page + 1) * self.page_size)
        return slots

    def start(self, request: Request) -> None:
        request.slots = self.match(request.tokens)
        request.first_own = request.tree_len = request.length
        request.row = self.free_rows.pop(random.randrange(len(self.free_rows)))
        self.req_to_token[request.row, : request.length] = torch.tensor(request.slots).int()
        self.tables.note_new_rows([request.row])

    def new_slots(self, request: Request, count: int) -> list[int]:
        slots = []
        for position in range(request.length, request.length + count):
            if position % self.page_size == 0:
                page = self.free_pages.pop()
                slots.append(page * self.page_size)
            else:
                slots.append((slots[-1] if slots else request.slots[-1]) + 1)
        return slots

    def keep_in_tree(self, request: Request) -> None:
        """cache_unfinished_req: slots the tree already has replace the request's own."""
        aligned = request.length // self.page_size * self.page_size
        for length in range(self.page_size, aligned + 1, self.page_size):
            page = request.slots[length - 1] // self.page_size
            self.tree.setdefault(tuple(request.tokens[:length]), page)
        held = self.cached_slots(request.tokens[:aligned])
        for mine, theirs in zip(request.slots[:aligned], held, strict=True):
            if mine != theirs and mine % self.page_size == 0:
                self.free_pages.append(mine // self.page_size)
        request.slots[:aligned] = held
        request.tree_len = aligned
        self.req_to_token[request.row, :aligned] = torch.tensor(held).int()

    def release(self, request: Request, keep: bool) -> None:
        """finish (keep) or abort and retract (not keep)."""
        if keep:
            self.keep_in_tree(request)
        for slot in request.slots[request.tree_len :]:
            if slot % self.page_size == 0:
                self.free_pages.append(slot // self.page_size)
        self.free_rows.append(request.row)
        request.slots, request.row = [], -1

    def evict_all(self) -> None:
        """Drop the whole prefix cache; only legal while nothing runs."""
        self.free_pages += self.tree.values()
        self.tree.clear()

    # One step of the model.

    def extend(self, batch: list[tuple[Request, int]]) -> StepPlan:
        prefix = torch.tensor([request.length for request, _ in batch])
        locs = []
        for request, count in batch:
            slots = self.new_slots(request, count)
            self.req_to_token[request.row, request.length : request.length + count] = torch.tensor(
                slots
            ).int()
            locs += slots
        plan = self.tables.plan_extend(
            torch.tensor([request.row for request, _ in batch]),
            prefix,
            torch.tensor([count for _, count in batch]),
            torch.tensor(locs),
            self.req_to_token,
            prefix.tolist(),
            [count for _, count in batch],
        )
        self.check_reads(plan, [request for request, _ in batch])
        written = []
        for request, count in batch:
            begin = request.length
            written += [identity(request.tokens[: p + 1]) for p in range(begin, begin + count)]
            request.slots += locs[:count]
            locs = locs[count:]
        self.write(plan, written)
        return plan

    def decode(self, batch: list[Request]) -> StepPlan:
        locs = []
        for request in batch:
            if request.length == len(request.tokens):
                request.tokens.append(random.randrange(3))
            (slot,) = self.new_slots(request, 1)
            self.req_to_token[request.row, request.length] = slot
            request.slots.append(slot)
            locs.append(slot)
        lengths = torch.tensor([request.length for request in batch])
        plan = self.tables.plan_decode(
            torch.tensor([request.row for request in batch]),
            lengths,
            torch.tensor(locs),
            self.req_to_token,
            int(lengths.max()),
        )
        self.write(plan, [identity(request.tokens[: request.length]) for request in batch])
        self.check_reads(plan, batch)
        return plan

    def write(self, plan: StepPlan, written: list[int]) -> None:
        values = torch.tensor(written)
        self.packed[plan.write.out_cache_loc] = values
        for buffer, index in (
            (self.ring, plan.write.ring_index),
            (self.sinks, plan.write.sink_index),
        ):
            kept = index[index >= 0]
            # A GPU writes in no order: two tokens of a step must not share a place.
            assert len(kept.unique()) == len(kept)
            buffer[kept] = values[index >= 0]

    def check_reads(self, plan: StepPlan, batch: list[Request]) -> None:
        """Whatever a plan reads is this request's token at that position."""
        for b, request in enumerate(batch):
            truth = [identity(request.tokens[: p + 1]) for p in range(int(plan.read.kv_lens[b]))]
            assert [value for value, _ in self.read(plan, b)] == truth

    def read(self, plan: StepPlan, b: int) -> list[tuple[int, str]]:
        """(value, source) of every position, by the rule in ReadPlan's docstring."""
        read, recent, sink = plan.read, self.windows.recent_tokens, self.windows.sink_tokens
        result = []
        for p in range(int(read.kv_lens[b])):
            if p < sink and read.sink_group[b, p] >= 0:
                index = int(read.sink_group[b, p]) * sink + p
                result.append((int(self.sinks[index]), "sink"))
            elif p >= read.ring_begin[b]:
                result.append((int(self.ring[read.ring_row[b] * recent + p % recent]), "ring"))
            else:
                page = int(read.page_table[b, p // self.page_size])
                slot = page * self.page_size + p % self.page_size
                result.append((int(self.packed[slot]), "packed"))
        return result

    def exact(self, plan: StepPlan, b: int) -> set[int]:
        """Positions that are read from a BF16 copy."""
        return {p for p, (_, source) in enumerate(self.read(plan, b)) if source != "packed"}


def decode_window(length: int, windows: WindowConfig) -> set[int]:
    """What every decode step must read in BF16, whatever happened before."""
    recent = range(max(0, length - windows.recent_tokens), length)
    return set(recent) | set(range(min(length, windows.sink_tokens)))


def prefill(scheduler: FakeScheduler, request: Request, chunk: int = 1000) -> list[StepPlan]:
    plans = []
    scheduler.start(request)
    while request.length < len(request.tokens):
        count = min(chunk, len(request.tokens) - request.length)
        plans.append(scheduler.extend([(request, count)]))
        scheduler.keep_in_tree(request)
    return plans


def random_tokens(count: int) -> list[int]:
    return [random.randrange(1000) for _ in range(count)]


SIZES = [(8, 12, 1), (8, 12, 4), (12, 8, 1), (0, 12, 1), (8, 0, 1), (0, 0, 4), (7, 13, 4)]


@pytest.mark.parametrize(("sink", "recent", "page_size"), SIZES)
def test_cold_request_decodes_over_exact_windows(sink, recent, page_size):
    scheduler = FakeScheduler(sink, recent, page_size=page_size)
    request = Request(random_tokens(50))
    (plan,) = prefill(scheduler, request)
    assert scheduler.read(plan, 0) == []  # a cold prompt reads nothing from the cache
    for _ in range(40):
        plan = scheduler.decode([request])
        assert scheduler.exact(plan, 0) == decode_window(request.length, scheduler.windows)


@pytest.mark.parametrize(("sink", "recent", "page_size"), SIZES)
@pytest.mark.parametrize("prompt_len", [1, 5, 9, 13])
def test_short_prompt_grows_through_its_windows(sink, recent, page_size, prompt_len):
    scheduler = FakeScheduler(sink, recent, page_size=page_size)
    request = Request(random_tokens(prompt_len))
    prefill(scheduler, request)
    for _ in range(40):
        plan = scheduler.decode([request])
        assert scheduler.exact(plan, 0) == decode_window(request.length, scheduler.windows)


@pytest.mark.parametrize(("sink", "recent", "page_size"), SIZES)
def test_prefix_hit_decodes_like_a_cold_request(sink, recent, page_size):
    scheduler = FakeScheduler(sink, recent, page_size=page_size)
    first = Request(random_tokens(60))
    prefill(scheduler, first)
    scheduler.release(first, keep=True)
    second = Request(first.tokens[:60])
    (plan,) = prefill(scheduler, second)
    hit = second.first_own
    cap = min(60 - 1, 60 - recent)
    assert hit == cap // page_size * page_size
    # The re-prefilled tail sees the hit as INT2 and the shared sinks: its own ring is empty.
    assert scheduler.exact(plan, 0) == set(range(min(sink, hit)))
    for _ in range(20):
        plan = scheduler.decode([second])
        assert scheduler.exact(plan, 0) == decode_window(second.length, scheduler.windows)
    assert int(scheduler.tables.groups_stolen) == int(scheduler.tables.sink_misses) == 0


@pytest.mark.parametrize(("sink", "recent", "page_size"), SIZES)
@pytest.mark.parametrize("chunk", [4, 12, 20])
def test_chunks_see_the_window_before_them(sink, recent, page_size, chunk):
    scheduler = FakeScheduler(sink, recent, page_size=page_size)
    request = Request(random_tokens(70))
    plans = prefill(scheduler, request, chunk)
    for plan in plans:
        # The FakeScheduler checked the values at the time; here only the sources matter.
        begin, length = int(plan.read.ring_begin[0]), int(plan.read.kv_lens[0])
        assert begin == max(0, length - recent)
        assert int((plan.read.sink_group[0, :length] >= 0).sum()) == min(sink, length)
    for _ in range(5):
        plan = scheduler.decode([request])
        assert scheduler.exact(plan, 0) == decode_window(request.length, scheduler.windows)


@pytest.mark.parametrize(("sink", "recent", "page_size"), SIZES)
def test_retracted_request_resumes_with_exact_windows(sink, recent, page_size):
    scheduler = FakeScheduler(sink, recent, page_size=page_size, num_requests=2)
    request, other = Request(random_tokens(40)), Request(random_tokens(33))
    prefill(scheduler, request)
    for _ in range(9):
        scheduler.decode([request])
    scheduler.release(request, keep=False)
    prefill(scheduler, other)  # may take over the row and the slots
    scheduler.decode([other])
    prefill(scheduler, request)
    for _ in range(20):
        plan = scheduler.decode([other, request])
        for b, each in enumerate((other, request)):
            assert scheduler.exact(plan, b) == decode_window(each.length, scheduler.windows)


def test_requests_that_part_inside_the_sinks_do_not_share_a_group():
    scheduler = FakeScheduler(sink=16, recent=4)
    first = Request(random_tokens(30))
    prefill(scheduler, first)
    second = Request(first.tokens[:10] + random_tokens(20))
    prefill(scheduler, second)
    assert second.first_own == 10
    plan = scheduler.decode([first, second])
    groups = plan.read.sink_group
    assert torch.equal(groups[0, :10], groups[1, :10])
    assert int(groups[0, 10]) != int(groups[1, 10])
    assert scheduler.exact(plan, 1) == decode_window(second.length, scheduler.windows)


def test_new_owner_of_a_row_does_not_inherit_its_ring():
    scheduler = FakeScheduler(sink=0, recent=12, num_requests=1)
    first = Request(random_tokens(40))
    prefill(scheduler, first)
    scheduler.release(first, keep=True)
    # Its hit ends where the ring of the row's former owner ends, to the position.
    second = Request(first.tokens + random_tokens(12))
    plan = prefill(scheduler, second)[0]
    assert second.first_own == 40
    assert scheduler.exact(plan, 0) == set()


def test_stolen_group_falls_back_to_codes_and_is_counted():
    scheduler = FakeScheduler(sink=8, recent=12, num_requests=2, num_groups=3)
    kept = Request(random_tokens(40))
    prefill(scheduler, kept)
    scheduler.release(kept, keep=True)
    for _ in range(3):
        passing = Request(random_tokens(20))
        prefill(scheduler, passing)
        scheduler.release(passing, keep=False)
    assert int(scheduler.tables.groups_stolen) == 1
    again = Request(kept.tokens[:40])
    (plan,) = prefill(scheduler, again)
    assert scheduler.exact(plan, 0) == set()
    assert int(scheduler.tables.sink_misses) == 8
    plan = scheduler.decode([again])
    assert scheduler.exact(plan, 0) == set(range(again.length - 12, again.length))


def test_running_request_keeps_its_group_while_others_pass():
    scheduler = FakeScheduler(sink=8, recent=12, num_requests=2, num_groups=4)
    running = Request(random_tokens(40))
    prefill(scheduler, running)
    for _ in range(20):
        passing = Request(random_tokens(20))
        prefill(scheduler, passing)
        plan = scheduler.decode([running, passing])
        scheduler.release(passing, keep=False)
        assert scheduler.exact(plan, 0) == decode_window(running.length, scheduler.windows)
    assert int(scheduler.tables.groups_stolen) > 10


def test_more_newcomers_than_groups_go_without():
    scheduler = FakeScheduler(sink=8, recent=4, num_requests=4, num_groups=2)
    batch = [Request(random_tokens(20)) for _ in range(4)]
    for request in batch:
        scheduler.start(request)
    scheduler.extend([(request, 20) for request in batch])
    plan = scheduler.decode(batch)
    with_sinks = [bool((plan.read.sink_group[b] >= 0).all()) for b in range(4)]
    assert sum(with_sinks) == 2


def test_padded_rows_of_a_captured_batch_disturb_nobody():
    scheduler = FakeScheduler(sink=8, recent=12)
    request = Request(random_tokens(30))
    prefill(scheduler, request)
    for _ in range(15):
        # Row 0, slot 0, length 1: what SGLang pads a captured batch with.
        scheduler.tables.plan_decode(
            torch.zeros(3, dtype=torch.int64),
            torch.ones(3, dtype=torch.int64),
            torch.zeros(3, dtype=torch.int64),
            scheduler.req_to_token,
            1,
        )
        plan = scheduler.decode([request])
        assert scheduler.exact(plan, 0) == decode_window(request.length, scheduler.windows)


@pytest.mark.parametrize(("sink", "recent", "page_size"), SIZES)
@pytest.mark.parametrize("num_groups", [40, 5])
def test_random_traffic(sink, recent, page_size, num_groups):
    """16 concurrent requests with shared prefixes, mixed batches, aborts and retractions."""
    scheduler = FakeScheduler(sink, recent, page_size=page_size, num_groups=num_groups)
    bases = [random_tokens(random.randrange(5, 60)) for _ in range(4)]
    running: list[Request] = []
    waiting: list[Request] = []
    for step in range(80):
        while len(running) + len(waiting) < 16:
            base = random.choice(bases)
            shared = base[: random.randrange(len(base) + 1)]
            waiting.append(Request(shared + random_tokens(random.randrange(1, 40))))
        batch = []
        while waiting and scheduler.free_rows and len(batch) < 5 and random.random() < 0.7:
            request = waiting.pop()
            if request.row < 0:
                scheduler.start(request)
            batch.append(
                (request, min(random.randrange(1, 50), len(request.tokens) - request.length))
            )
        if batch and running and random.random() < 0.3:  # mixed chunk: decodes ride along
            for request in random.sample(running, min(3, len(running))):
                request.tokens.append(random.randrange(3))
                batch.append((request, 1))
        if batch:
            scheduler.extend(batch)
            for request, _ in batch:
                scheduler.keep_in_tree(request)
                if request in running:
                    continue
                (running if request.length == len(request.tokens) else waiting).append(request)
        if running:
            plan = scheduler.decode(running)
            for b, request in enumerate(running):
                expected = decode_window(request.length, scheduler.windows)
                got = scheduler.exact(plan, b)
                if num_groups == 40 and sink:
                    assert got == expected
                assert got <= expected
                assert expected - got <= set(range(sink))
        for request in list(running):
            if random.random() < 0.12 or request.length > 150:
                running.remove(request)
                scheduler.release(request, keep=random.random() < 0.6)
                if random.random() < 0.3 and len(request.tokens) < 100:
                    waiting.append(request)  # retracted
        if step == 40:
            for request in running + [r for r in waiting if r.row >= 0]:
                scheduler.release(request, keep=True)
            running, waiting = [], []
            scheduler.evict_all()
